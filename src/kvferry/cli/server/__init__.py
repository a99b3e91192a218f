"""What every command that serves HTTP needs: sockets, access, logs, an orderly end.

Enters: an ASGI application, an address, signals. Leaves: a server that runs until it is told to end, and has answered
what it had begun. It does not know what is served.
"""
