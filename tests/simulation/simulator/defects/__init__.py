"""Defects that are put into sessions and engines on purpose, one at a time.

Enters: the real sessions. Leaves: sessions with one defect each, by name. They know nothing of the checks that must
find them.
"""
