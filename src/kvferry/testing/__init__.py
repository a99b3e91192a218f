"""Oracles, strategies and contract suites that ship with the package, for our tests and for yours."""
