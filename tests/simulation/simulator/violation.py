"""The end of a run that has shown a defect."""

from __future__ import annotations


class Violation(AssertionError):
    """A run has shown a defect."""
