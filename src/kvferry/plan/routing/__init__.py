"""Who sends which box to whom.

Enters: the layouts of all ranks of two engines. Leaves: a `Route`, one list of legs per pair of ranks. It depends on
shapes only: it knows no address, no block and no byte stride.
"""
