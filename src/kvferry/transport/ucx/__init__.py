"""UCX on this machine: which copies of it are installed, which settings suit the machine, and what it really uses.

Enters: facts of the machine and the user's own UCX variables. Leaves: settings with their reasons, findings with hints,
the transports of open endpoints. It does not know NIXL's agents, nor peers.
"""
