"""Which instance a request goes to, and whether it is admitted: pure functions on records.

Enters: a request's cost and a snapshot of the instances. Leaves: a choice with its reason. It knows no I/O and no
clock.
"""
