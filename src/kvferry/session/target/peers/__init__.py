"""Source ranks: the handshake with each, and the programs that follow from what they have told.

Enters: answers of sources. Leaves: questions to them, and `Binding`s, one per set of source ranks. It does not know
which requests want something of a peer.
"""
