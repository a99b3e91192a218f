"""One request on its way through its legs.

Enters: a checked request. Leaves: an answer, and what its legs say about instances. `state_machine` decides without
I/O; `driver` carries out. It does not know how instances are found or chosen.
"""
