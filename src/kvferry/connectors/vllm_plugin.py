"""vLLM's plugin hook: after it, `"kv_connector": "FerryConnector"` is enough to name the connector."""

from __future__ import annotations

NAME = "FerryConnector"
MODULE = "kvferry.connectors.vllm"


def register() -> None:
    """Called by vLLM in each of its processes, sometimes more than once; imports nothing of the connector itself."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(NAME, MODULE, NAME)
