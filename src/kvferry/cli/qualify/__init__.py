"""`kvferry qualify`: whether this machine's devices are fit for transfers, in one command."""
