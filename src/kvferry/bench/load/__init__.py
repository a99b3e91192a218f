"""Requests, when they are due, and what came back.

Enters: a workload by seed or from a file, a server. Leaves: a record of times and counts per request. It judges
nothing: that is `report`.
"""
