"""The thread of a rank: an event loop over sockets, transports, staging memory and the engine's requests.

Enters: calls of the engine, frames, completions. Leaves: notices to the engine, frames, posts. It decides nothing: the
sessions do.
"""
