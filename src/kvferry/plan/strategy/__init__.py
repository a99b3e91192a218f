"""Which strategy moves the same rows the fastest: direct, scattered at the target, or packed at the source.

Enters: copies, or only their counts, and measured costs. Leaves: the rows of each stage, and a price per strategy. It
knows no request and no peer.
"""
