"""The only owner of threads and sockets of the transfer: feeds sessions with events and does what they command.

Enters: a cache, calls of its engine, frames of peers. Leaves: notices to the engine, frames, transfers. It decides
nothing about a lease or a fetch: the sessions do.
"""
