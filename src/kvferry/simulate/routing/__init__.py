"""The router's real parts, and in place of its sockets what asks engines that are modelled.

Enters: arrivals. Leaves: what became of each request. It must not know: what incidents there are.
"""
