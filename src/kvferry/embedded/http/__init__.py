"""The embedded engine as an HTTP server.

Enters: ASGI messages. Leaves: requests for `answers`. It knows no model.
"""
