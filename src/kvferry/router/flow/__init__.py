"""One client's request on its way through a prefill and a decode instance.

Enters: a checked request. Leaves: an answer, and what it says about instances. `state_machine` decides without I/O,
`driver` carries out: `dispatcher` sends requests to instances, `relay` passes the answer on. It does not know how
instances are found or chosen. Two that meet in a room, as SGLang's do, are asked at once; `early_prefill` watches the
prefill request of these as well.
"""
