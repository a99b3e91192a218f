"""Whether two engines keep the same states (`compatibility`), and who sends which box to whom (`route`).

Enters: the layouts of all ranks of two engines. Leaves: a `Route`, one list of legs per pair of ranks. It depends on
shapes only: it knows no address, no block and no byte stride.
"""
