"""Ways to move rows of bytes between two processes. `base` is the contract, `registry` has one line per transport.

Enters: memory to register, descriptors of peers, columns of addresses and lengths. Leaves: the ends of tickets. No
transport knows another one, a session, a lease or a block.
"""
