"""Whether a split answers as the whole does.

Enters: prompts, two servers that speak OpenAI's API. Leaves: how far apart their answers are, with controls; a page.
It knows no engine and no cache.
"""
