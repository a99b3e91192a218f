"""vLLM's connector on TPUs: `"kv_connector": "TPUConnector"` of the module `kvferry.connectors.vllm_tpu`.

tpu-inference accepts a connector by no other name than those of its own.

Enters: the arrays of its runner, and the beginning and end of each step. Leaves: leases and fetches of an agent per
device. The scheduler's half is that of `connectors.vllm`, and so is the worker's, of which each device of the process
has one: `ranks` puts these together, `steps` has the runner's turns, `description` the layout.
"""

from kvferry.connectors.vllm_tpu.connector import TPUConnector

__all__ = ["TPUConnector"]
