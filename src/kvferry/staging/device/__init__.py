"""Copies on accelerators: kernels, streams, pinned memory, and the table of devices."""
