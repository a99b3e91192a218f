"""A fleet of engines that are times and counts, behind the router's real policy, pool and breakers, on a virtual clock.

Enters: a fleet, what its steps cost, requests, incidents. Leaves: what became of every request, and how busy everything
was. It must not know: clocks, files, terminals.
"""
