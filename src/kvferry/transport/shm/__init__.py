"""Shared memory of one host: a peer's cache is attached and copied by this process, without a daemon."""
