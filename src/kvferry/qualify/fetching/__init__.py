"""Engines for the check of fetches: a rank with its cache on the device, and one in a process of its own."""
