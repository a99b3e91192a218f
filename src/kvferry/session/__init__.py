"""Who may read what, and until when: state machines without I/O, `handle(event, now) -> commands`.

`source` keeps the leases (`lease`) of an engine's finished prefills, and carries claims out itself for targets that
want to be written to (`targets`, `writes`); `early` and `aborted` are what arrives too soon and too late. `target`
fetches caches for an engine that decodes, with `handshake` (meeting source ranks), `programs` (what to read from them),
`fetch` (one request's reads) and `reading` (what moves them on), `claims` (what is said to sources, and again),
`verify` (whether what has landed is what the source has) and `farewell` (telling sources of an early end, and waiting
for their word). `machine` walks the transition tables; `events` is everything that goes in and comes out.
"""
