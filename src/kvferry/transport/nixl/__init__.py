"""NIXL with its UCX backend: RDMA where there is a NIC, other ways of UCX where there is none.

Enters: registered memory and descriptor lists. Leaves: finished transfers. Nothing outside this folder imports NIXL.
"""
