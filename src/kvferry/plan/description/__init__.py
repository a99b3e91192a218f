"""What a cache is: states, shares of ranks, layouts in memory, block tables, and the name of a prompt.

Enters: numbers of a model and an engine, or a layout made by hand. Leaves: records with every element's place, checked.
It knows no peer and no request's blocks.
"""
