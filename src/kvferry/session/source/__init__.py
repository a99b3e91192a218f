"""The source side: leases on computed caches.

Enters: events of the engine, of target ranks and of transports. Leaves: commands. `session` checks and grants claims,
and gives each other message to whom it concerns: `handshake` answers what comes before a claim, `lease_table` has all
leases, `writes` carries out claims that the source writes itself (`direct_write`, `packed_write`) to the `targets` that
it has reached, and `completed_reads` answers whether what has arrived is valid. `early_messages` keeps messages that
overtake others. The source's record is the only authority on who may read what; it knows nothing of the target's
engine.
"""
