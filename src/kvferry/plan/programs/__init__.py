"""The copies of a request: a route bound to two layouts, and then to block tables.

Enters: a route, layouts, block tables. Leaves: columns of source address, target address and length.
"""
