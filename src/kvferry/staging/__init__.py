"""Staging memory between blocks and transports: its allocator, and gathers and scatters between slots and blocks.

Enters: requests for slots, tiles of rows. Leaves: slots, ends of copies. It does not know sessions, peers or leases.
"""
