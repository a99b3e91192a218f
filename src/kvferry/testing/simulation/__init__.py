"""Whole conversations between engines under faults, by seed: the real session code on a virtual clock.

`run.simulate(seed)` plays one run and says how it ended. `python -m kvferry.testing.simulation` plays many.
"""
