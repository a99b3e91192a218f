"""The control channel: authenticated sockets between agents, their addresses and limits.

Enters: frames. Leaves: frames. It does not know what they mean.
"""
