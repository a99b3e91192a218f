"""SGLang: a transfer backend, chosen with `--disaggregation-transfer-backend kvferry`.

Enters: SGLang's calls of a prefill's sender and a decode's receiver, its pools. Leaves: leases and fetches of an agent
per rank. `plugin` is all that touches SGLang's inside; `manager`, `sender` and `receiver` are the classes that SGLang
calls, `description` says what its pools are to a planner, `rank` the agent, `handoff` the first token in SGLang's own
buffers. None of SGLang's own listeners is opened.
"""

from kvferry.connectors.sglang.plugin import register

__all__ = ["register"]
