"""Whole conversations between engines under faults, by seed: the real session code on a virtual clock.

`run.simulate(seed)` plays one run and says how it ended. `make simulate` plays many, see docs/simulation.md. From the
bottom: `state` is what a run is made of, `checks` what must never happen, `defects` what proves that the checks find
something, `network` moves frames and bytes, `engines` run the sessions, and `scenario` makes things happen.
"""
