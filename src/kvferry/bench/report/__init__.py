"""Figures of what came back: summaries, limits, a page. Pure."""
