"""Which instances there are, which of them can be used, and what each has to do.

Enters: registrations, probes, outcomes of requests. Leaves: snapshots for a policy, reservations. It knows no
request's body.
"""
