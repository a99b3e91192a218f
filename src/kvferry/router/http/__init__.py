"""The router as an HTTP server: ASGI applications and the answers that the router gives by itself.

Enters: ASGI messages. Leaves: checked requests for `flow`. It does not choose instances.
"""
