"""Plain sockets: works everywhere and needs nothing.

Enters: registered memory, a peer's address and key, rows. Leaves: copied bytes. `client` asks a peer for rows, over a
few connections, each a `lane` with a thread while it is used; `server` answers the requests of peers. It knows no
session and no block.
"""
