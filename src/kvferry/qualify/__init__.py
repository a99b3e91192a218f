"""Whether kvferry is right and fast on a machine's devices: checks, and what their outcomes mean.

Enters: a kind of device. Leaves: an `Outcome` of each check, and a report without names. `kvferry qualify` runs every
check in a process of its own, as a device that fails may take its process along.
"""
