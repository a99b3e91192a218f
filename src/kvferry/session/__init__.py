"""Who may read what, and until when: state machines without I/O, `handle(event, now) -> commands`.

`source` keeps the leases of an engine's finished prefills; `target` fetches caches for an engine that decodes;
`machine` holds the transition tables' walker, `events` everything that goes in and comes out.
"""
