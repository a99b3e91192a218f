"""How the same rows move the fastest: straight, scattered at the target, or packed at the source."""
