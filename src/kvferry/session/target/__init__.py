"""The target side: fetches of caches that another engine has computed.

Enters: events of the engine, of peers and of transports. Leaves: commands. It trusts no byte that the source has not
confirmed.
"""
