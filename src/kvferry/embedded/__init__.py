"""Hugging Face transformers with continuous batching, as an engine of our own with an OpenAI server. Runs on any CPU.

Enters: OpenAI requests, leases and fetches of other engines. Leaves: answers, references to computed caches, metrics.
It uses the public API like every engine, and knows no router.
"""
