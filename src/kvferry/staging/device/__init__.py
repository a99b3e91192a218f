"""Gathers and scatters on accelerators: kernels, streams, pinned memory, and the table of devices.

Enters: tiles of rows. Leaves: finished copies. Nothing else of `staging` imports torch or Triton; `table`, `launches`
and `patterns` do without.
"""
