"""The contract of a transport, as checks for authors of transports, and a peer in another process.

Enters: a function that makes a transport. Leaves: checks that raise. It does not know agents.
"""
