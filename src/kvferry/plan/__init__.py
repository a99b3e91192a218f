"""What goes where: the intersection of two descriptions. Pure functions on integers (numpy and stdlib only).

Read in this order: `span`, `layout` (the description), `route` (who sends which box to whom), `program`
(a route bound to two layouts), `copies` (the rows of one request).
"""
