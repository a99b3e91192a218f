"""Which peer is reached over which transport, chosen by a self-test."""
