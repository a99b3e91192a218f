"""What vLLM's API server asks its workers: `--worker-extension-cls kvferry.connectors.vllm.extension.Extension`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

from kvferry import Reason, Reference
from kvferry.connectors.vllm.connector import FerryConnector
from kvferry.connectors.vllm_middleware.workers import TROUBLE
from kvferry.errors import ConfigurationError


class Extension:
    """vLLM makes it a base of its worker's class; a method is called between two steps, and must not raise."""

    def kvferry_facts(self) -> dict[str, str]:
        """Who this engine is, or under `TROUBLE` why it cannot be said now; empty where another connector moves its
        caches."""
        connector = _ours()
        try:
            return connector.facts() if connector is not None else {}
        except ConfigurationError as error:
            return {TROUBLE: str(error)}

    def kvferry_release(self, engine_id: str, epoch: str, request_id: str, lease_id: str) -> str:
        """End a lease: `released`, or the reason why there is none. While the engine sleeps there is none at all."""
        connector = _ours()
        if connector is None:
            return str(Reason.WRONG_ENGINE)
        try:
            return connector.release(Reference(engine_id, epoch, request_id, lease_id))
        except ConfigurationError:
            return str(Reason.UNKNOWN_LEASE)

    def kvferry_withdraw(self, names: Sequence[str]) -> bool:
        """End the leases of the requests that callers have named so; whether there was one."""
        connector = _ours()
        return connector is not None and connector.withdraw_leases(names)


def _ours() -> FerryConnector | None:
    return _among([get_kv_transfer_group()] if has_kv_transfer_group() else [])


def _among(connectors: Sequence[Any]) -> FerryConnector | None:
    """Ours among these, or among the children of one of them."""
    for connector in connectors:
        if isinstance(connector, FerryConnector):
            return connector
        if found := _among(getattr(connector, "sub_connectors", [])):
            return found
    return None
