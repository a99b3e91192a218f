"""Copies of many rows inside one address space.

Enters: columns of addresses and lengths. Leaves: copied bytes. It knows no peer, no session and no block.
"""
