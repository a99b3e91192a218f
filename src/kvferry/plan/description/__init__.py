"""What a cache is: states, shares of ranks, layouts in memory, block tables.

Enters: numbers of a model and an engine. Leaves: records with every element's place. It knows no peer.
"""
