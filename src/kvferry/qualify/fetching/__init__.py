"""Engines for the check of fetches: a rank with its cache on the device, and one in a process of its own.

Enters: a kind of device, a layout, a transport. Leaves: what a fetch wrote, to compare. It judges nothing.
"""
