"""Plain sockets: works everywhere and needs nothing.

`client` requests rows with a thread and a connection per peer; `server` serves registered memory.
"""
