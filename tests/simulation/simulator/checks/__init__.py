"""What must never happen, whatever goes wrong.

Enters: what ranks, tickets and copies are about to do, or have done. Leaves: a `Violation`, which ends the run. The
checks look at records only, and ask no session.
"""
