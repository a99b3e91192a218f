"""vLLM's connector: `"kv_connector": "FerryConnector", "kv_connector_module_path": "kvferry.connectors.vllm"`.

Enters: vLLM's calls of a connector, in its scheduler (`scheduler`) and in its workers (`worker`), and its tensors
(`description`). Leaves: leases and fetches of an agent per rank, and what vLLM is told of them. vLLM imports it in all
of its processes; nothing else needs it.
"""

from kvferry.connectors.vllm.features import unsupported
from kvferry.connectors.vllm_plugin import register

try:
    from kvferry.connectors.vllm.connector import FerryConnector
except ImportError as error:
    if not (error.name or "").startswith("vllm."):
        raise
    raise unsupported(str(error)) from error

# vLLM's MultiConnector looks its children's statistics up by name, wherever the class came from.
register()

__all__ = ["FerryConnector"]
