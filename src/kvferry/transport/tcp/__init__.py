"""Plain sockets: works everywhere and needs nothing.

A thread and a connection per peer ask (`client`); the other side serves registered memory (`server`).
"""
