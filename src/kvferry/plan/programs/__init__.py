"""The copies of a request: a route bound to two layouts, and then to block tables.

Enters: a route, layouts, block tables, token ranges. Leaves: `Copies`, columns of source address, target address and
length, or `Tile`s, the same as sums. It knows no staging memory and no cost.
"""
