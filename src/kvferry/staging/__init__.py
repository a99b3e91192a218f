"""Memory between the blocks and the wire: who may have a piece of it, and the copies into it and out of it."""
