"""SGLang: a transfer backend, chosen with `--disaggregation-transfer-backend kvferry`.

Enters: SGLang's calls of a prefill's sender and a decode's receiver, its pools. Leaves: leases and fetches of an agent
per rank. `plugin` makes SGLang know the backend; `manager`, `sender` and `receiver` implement SGLang's base classes,
and `manager` reads SGLang's queues. `description` says what its pools are to a planner, `rank` has the agent, `handoff`
puts the first token into SGLang's own buffers. None of SGLang's own listeners is opened.
"""

from kvferry.connectors.sglang.plugin import register

__all__ = ["register"]
