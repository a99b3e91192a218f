"""Memory that peers reach: staging memory and the probe, slots of it, slots of peers; and digests of registered memory.

Enters: requests for slots, gathers, scatters and digests. Leaves: their results. It does not know the wire nor
transports.
"""
