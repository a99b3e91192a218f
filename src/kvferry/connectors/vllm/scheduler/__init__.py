"""The half in vLLM's scheduler: which request is fetched, which is kept, and what its prompt is called.

Enters: vLLM's requests. Leaves: metadata for the workers. It touches no memory.
"""
