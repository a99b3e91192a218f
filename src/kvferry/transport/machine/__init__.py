"""What this machine and this process are: network ports, accelerators, limits, addresses.

Enters: `/proc` and `/sys`. Leaves: facts. It opens no transport and does not know UCX.
"""
