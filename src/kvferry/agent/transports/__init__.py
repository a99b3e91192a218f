"""Which peer is reached over which transport, as negotiated with self-tests.

Enters: offers of peers, tickets to post. Leaves: connections with their costs, ends of tickets. It knows no lease and
no block. `costs` turns a self-test into what strategies are compared by, for memory of a device as well.
"""
