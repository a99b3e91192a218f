"""Who may read what, and until when: state machines without I/O, `handle(event, now) -> commands`.

`source` keeps the leases (`lease`) of an engine's finished prefills. `target` fetches caches for an engine that
decodes, with `handshake` (meeting source ranks), `programs` (what to read from them), `fetch` (one request's reads),
`verify` (whether those are what the source has) and `farewell` (telling sources of an early end). `machine` walks the
transition tables; `events` is everything that goes in and comes out.
"""
