"""Oracles, strategies and contract suites that ship with the package, for our tests and for yours.

Enters: an engine or a transport as functions of its author. Leaves: checks that raise. It knows no test runner.
"""
