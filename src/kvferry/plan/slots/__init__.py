"""A request cut into slots of staging memory.

Enters: a program, block tables, token ranges and the size of a slot. Leaves: what is gathered, sent and scattered for
each slot; both ranks find the same. It knows no staging memory's address and not when a slot is free.
"""
