"""What a run is made of: bytes, blocks, prompts, layouts, and records of what a rank has.

Enters: layouts and what the random generator says. Leaves: records that the rooms above read and change. It knows no
session, and no network.
"""
