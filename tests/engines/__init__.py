"""Engines made by hand and by chance, and the oracle that knows what their caches must hold."""
