"""Ways to move rows of bytes between two processes. `base` is the contract; each other file is one way."""
