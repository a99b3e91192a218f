"""Who may read what, and until when: state machines without I/O, `handle(event, now) -> commands`.

Enters: `events` of the engine, of peers, of transports and of staging memory, each with the time. Leaves: `commands`
for the agent, and what the engine is told. A session does no I/O, has no clock and starts no thread. `source` serves
leases on computed caches, `target` fetches caches; neither knows the other's code, only its messages (`kvferry.wire`).
Both use `state_machine` (transition tables), `slot` (one slot of staging memory in use), `keys` (names of peers and of
work), `refusals` and `timing`.
"""
