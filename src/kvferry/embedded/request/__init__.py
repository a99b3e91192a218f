"""What a client asks of the engine: every field is honoured or refused.

Enters: JSON. Leaves: one checked record. Pure.
"""
