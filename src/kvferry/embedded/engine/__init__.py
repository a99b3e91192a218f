"""Requests, blocks and tokens: who may use how much of the cache."""
