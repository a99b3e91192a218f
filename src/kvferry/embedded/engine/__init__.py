"""Requests, blocks and tokens: who may use how much of the cache.

Enters: checked requests, caches that have arrived. Leaves: tokens as they come, and blocks that a transfer may read. It
knows no HTTP and no peer.
"""
