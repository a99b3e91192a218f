"""The end of a run that has shown a defect."""

from __future__ import annotations

__all__ = ["Violation"]


class Violation(AssertionError):
    """A run has shown a defect."""
