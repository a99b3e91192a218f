"""Serves OpenAI requests with one prefill and one decode instance each.

Enters: HTTP requests of clients, registrations of engines. Leaves: requests to engines, answers to clients. It knows
nothing of an engine's insides and never sees a cache.
"""
