"""From a checked request to an answer in the OpenAI dialect, streamed or whole.

Enters: checked requests. Leaves: OpenAI objects, and what the answer cost. It knows no socket and no block.
"""
