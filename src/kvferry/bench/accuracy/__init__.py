"""Whether a split answers as the whole does: prompts in, what two servers say of each, and how far they are apart.

It must not know of engines or caches: both servers speak OpenAI's API.
"""
