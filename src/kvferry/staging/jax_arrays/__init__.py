"""Caches that are arrays of JAX.

Enters: tiles of rows, the engine's steps. Leaves: finished copies, and new arrays. It knows no transport.

Nothing can register their memory, and nobody writes to them but compiled programs: `units` says what is moved at a
time, `programs` compiles that, `held_arrays` has the newest arrays, which the engine and copies use in turn, each whole
and in `pieces`, and `copies` moves rows between them and memory of the host.
"""
