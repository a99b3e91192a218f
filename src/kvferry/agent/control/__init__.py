"""The control channel: authenticated sockets between agents, their addresses, limits and liveness probes.

Enters: frames. Leaves: frames. It does not know what they mean.
"""
