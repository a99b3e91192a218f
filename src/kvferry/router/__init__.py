"""Serves OpenAI requests with one prefill and one decode instance each. Enters: HTTP requests and registrations of
engines. Leaves: legs to engines, answers to clients. It knows no engine's internals and never sees a cache.
"""
