"""What the engine asks of whoever moves caches, and what it tells about it."""
