"""A module for each check: `run(kind)` looks at the device of that kind that is here, other functions at any.

Enters: a kind of device, by kvferry's name. Leaves: an `Outcome`. What raises has failed.
"""
