"""vLLM's connector: `"kv_connector": "FerryConnector", "kv_connector_module_path": "kvferry.connectors.vllm"`.

Imported by vLLM in all of its processes; it needs vLLM and nothing of it is needed elsewhere.
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
