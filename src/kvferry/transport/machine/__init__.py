"""What this machine and this process are: network cards, accelerators, limits, copies of UCX, and the settings
that follow from them.

Enters: `/proc`, `/sys` and the environment. Leaves: facts, settings, findings with hints. It opens no transport.
"""
