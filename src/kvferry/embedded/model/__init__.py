"""A tiny model with random weights, made on this machine."""
