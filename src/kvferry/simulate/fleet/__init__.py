"""Engines and links that are times and counts, in their racks.

Enters: what steps and bytes cost, work, incidents. Leaves: events on the virtual clock. It must not know: the router.
"""
