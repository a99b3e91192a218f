"""Load for an OpenAI server, and what it did to it.

Enters: a server's address, a workload or prompts, limits. Leaves: figures and a page; of `accuracy`, how far the
answers of two servers are apart. It must not know engines, caches or the router: whatever speaks OpenAI's API is
measured alike.
"""
