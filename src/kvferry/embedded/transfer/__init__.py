"""What the engine asks of whoever moves caches, and what it tells about it.

Enters: blocks to lease, references to fetch. Leaves: what has arrived or failed, whether the engine should be sent
requests, figures. It knows no request's text.
"""
