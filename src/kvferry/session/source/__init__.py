"""The source side: leases on computed caches.

Enters: events of the engine, of peers and of transports. Leaves: commands. The source's record is the only authority
on who may read what; it knows nothing of the target's engine.
"""
