"""Gathers and scatters on accelerators: kernels, streams, pinned memory, and the table of devices.

Enters: tiles of rows. Leaves: finished copies. Only this room imports torch and Triton; `table`, `launches` and
`patterns` do without.
"""
