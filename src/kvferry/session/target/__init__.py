"""The target side: fetches of caches that another engine has computed.

Enters: events of the engine, of source ranks and of transports. Leaves: commands. `peers` are the source ranks and the
handshake with them, `reads` moves a fetch from its claims to valid bytes, `read_strategy` chooses how its bytes move.
`liveness` sends heartbeats for leases and decides when a peer counts as lost, and `quarantine` keeps the blocks of a
failed fetch until its aborts are acknowledged. No byte is trusted that the source has not confirmed.
"""
