"""Shared memory of one host: this process maps the memory of a peer and copies from and to it, without a daemon.

Enters: memory that `shared_memory` has allocated, a peer's file descriptors, rows. Leaves: copied bytes, and views of a
peer's memory. It knows no session and no block, and not whether the bytes that it copies are current.
"""
