"""The embedded engine as an HTTP server.

Enters: ASGI messages. Leaves: requests for `serving`, and this engine's registration at a router. It knows no model.
"""
