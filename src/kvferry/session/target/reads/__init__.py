"""The reads of fetches: strategy, claim, grant, slots of staging memory, and the check of what has arrived.

Enters: grants and news of sources, tickets and slots. Leaves: claims, tickets, and `Fetched` or `FetchBroken`. What
happens to a fetch that has failed is decided above.
"""
