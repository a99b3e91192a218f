"""Which instances there are, which of them can be used, and what each has to do.

Enters: instances that come and go, probes, outcomes of requests. Leaves: snapshots for a policy, reservations. It knows
no request's body. `engine_info` says how an engine hands a cache over, and which two are never paired.
"""
