"""Figures of what came back. Pure.

Enters: records of requests, limits. Leaves: summaries, as `vllm bench serve` names them, and a page. It asks nobody and
knows no server.
"""
