"""HTTP to engines.

Enters: a request to one address. Leaves: the head and the body of its answer, or a failure with a stable label. It
knows no roles.
"""
