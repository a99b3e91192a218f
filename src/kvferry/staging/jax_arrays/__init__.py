"""Caches that are arrays of JAX: nothing can register their memory, nobody writes to them but compiled programs.

`units` says what is taken out of an array, or put into it, at a time; `programs` compiles that; `held_arrays` has the
arrays, which the engine and transfers use in turn; `copies` moves rows between them and memory of the host.
"""
