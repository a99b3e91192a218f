"""Which transport is used to a peer: what was asked for, what both sides have, what a self-test measured.

Enters: candidates and measurements. Leaves: a choice with its reason. It moves no cache.
"""
