"""vLLM's workers, asked by its API server through `collective_rpc`: each rank answers for itself."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from kvferry import Reason, Reference
from kvferry.errors import ConfigurationError, FerryError, TransferError

RELEASED = "released"
# They answer between two steps.
ANSWER_S = 30.0
# An engine wakes up in a new epoch, and perhaps at other addresses. Facts are forgotten whenever this server is told to
# have it sleep or wake up; another one of several API servers may be told as well.
FACTS_S = 5.0
TROUBLE = "trouble"
EXTENSION = "kvferry.connectors.vllm.extension.Extension"


@dataclass(frozen=True, slots=True)
class EarlyFacts:
    """Who this engine is, the key for promises that its scheduler believes, and where its ranks listen, in order."""

    engine_id: str
    epoch: str
    key: str
    addresses: tuple[str, ...]


class AsleepError(FerryError):
    """The engine has no caches at the moment, and none of its ranks listens. It says what to do about it."""


class Workers:
    """`state` is that of vLLM's app. Facts are asked for once where the engine never sleeps."""

    def __init__(self) -> None:
        # What each rank has told, in their order.
        self._told: tuple[dict[str, str], ...] = ()
        self._asked_at = 0.0
        self._asking = asyncio.Lock()
        # Anybody may send a release: whatever comes, vLLM is asked once per step at most.
        self._turn = asyncio.Lock()
        # What nobody has told the workers yet.
        self._withdrawn: list[str] = []

    async def facts(self, state: Any) -> dict[str, str]:
        """What the first rank tells of its engine. Raises ConfigurationError where it cannot, AsleepError,
        FerryError."""
        return (await self._ranks(state))[0]

    async def _ranks(self, state: Any) -> tuple[dict[str, str], ...]:
        async with self._asking:
            if not self._told or (may_sleep(state) and time.monotonic() - self._asked_at > FACTS_S):
                self.forget()
                self._asked_at = time.monotonic()
                self._told = _understood(await _ask(state, "kvferry_facts", ()))
            return self._told

    def forget(self) -> None:
        """The engine has slept, or may have: whatever is known of it may not be so any more."""
        self._told = ()

    async def early(self, state: Any) -> EarlyFacts:
        """What references to prompts that are not computed are made of. Raises ConfigurationError, AsleepError,
        FerryError."""
        ranks = await self._ranks(state)
        if num_replicas(state) != 1:
            what = "with data parallelism it is not known in advance which replica computes a prompt"
            raise ConfigurationError(what, found=f"{num_replicas(state)} replicas", expected="one replica")
        facts, addresses = ranks[0], tuple(rank.get("address", "") for rank in ranks)
        return EarlyFacts(facts["engine_id"], facts["epoch"], facts["key"], addresses)

    async def release(self, state: Any, reference: Reference) -> bool | None:
        """End a lease of this engine; whether there was one. A room's reference names no engine. Of several replicas
        each is told, and vLLM passes on what the first one answers: None where that says nothing of the others.

        Raises TransferError for another engine's or another process's, ConfigurationError, AsleepError, FerryError.
        """
        if not reference.engine_id:
            facts = await self.facts(state)
            reference = replace(reference, engine_id=facts["engine_id"], epoch=facts["epoch"])
        if foreign := self._foreign(state, reference):
            raise _not_ours(foreign)
        asked = (reference.engine_id, reference.epoch, reference.request_id, reference.lease_id)
        async with self._turn:
            answers = set(await _ask(state, "kvferry_release", asked))
        if num_replicas(state) != 1 and RELEASED not in answers:
            return None
        for reason in FOREIGN:
            if reason in answers:
                raise _not_ours(reason)
        return RELEASED in answers

    async def withdraw_leases(self, state: Any, names: Sequence[str]) -> None:
        """End the leases of the requests that a caller has named so, if there are any. All that wait for their turn go
        together: many clients may leave at once, and a name may soon be used again. Raises ConfigurationError,
        FerryError."""
        self._withdrawn += names
        async with self._turn:
            withdrawn, self._withdrawn = self._withdrawn, []
            if withdrawn:
                await _ask(state, "kvferry_withdraw", (withdrawn,))

    def _foreign(self, state: Any, reference: Reference) -> str:
        """Why a reference is none of this engine's, as far as that is known without asking it. Of several replicas each
        has a name of its own, and one that may sleep knows best in which epoch it is."""
        if not self._told or num_replicas(state) != 1 or may_sleep(state):
            return ""
        facts = self._told[0]
        if facts["engine_id"] != reference.engine_id:
            return Reason.WRONG_ENGINE
        return "" if facts["epoch"] == reference.epoch else Reason.WRONG_EPOCH


def num_replicas(state: Any) -> int:
    """How many engines answer behind this server: vLLM's data parallelism."""
    return int(state.engine_client.vllm_config.parallel_config.data_parallel_size)


def may_sleep(state: Any) -> bool:
    """Whether vLLM was started with `--enable-sleep-mode`."""
    return bool(state.engine_client.vllm_config.model_config.enable_sleep_mode)


def is_draining(state: Any) -> bool:
    """Whether vLLM has been told to end: the first thing that it does then is to take back what would end it when it is
    forgotten. vLLM itself has no word for it."""
    core = getattr(getattr(state, "engine_client", None), "engine_core", None)
    finalizer = getattr(core, "_finalizer", None)
    return finalizer is not None and not finalizer.alive


FOREIGN = {
    Reason.WRONG_ENGINE: "these kv_transfer_params belong to another engine",
    Reason.WRONG_EPOCH: "these kv_transfer_params were issued before this engine was restarted",
}


def _not_ours(reason: str) -> TransferError:
    return TransferError(reason, FOREIGN[Reason(reason)], hint="send it to the server that answered the prefill")


def _understood(answers: Sequence[dict[str, str]]) -> tuple[dict[str, str], ...]:
    """What the ranks tell. Raises AsleepError, and ConfigurationError where they tell nothing."""
    for answer in answers:
        if TROUBLE in answer:
            raise AsleepError(answer[TROUBLE])
    if not answers[0]:
        what = "this server does not run kvferry's connector"
        raise ConfigurationError(what, expected="FerryConnector in --kv-transfer-config")
    return tuple(dict(answer) for answer in answers)


async def _ask(state: Any, method: str, arguments: tuple[object, ...]) -> list[Any]:
    client = state.engine_client
    if not client.vllm_config.parallel_config.worker_extension_cls:
        expected = f"vllm serve --worker-extension-cls {EXTENSION}"
        raise ConfigurationError("vLLM's workers have no kvferry extension", expected=expected)
    # vLLM raises a bare Exception with whatever went wrong in a worker: it is taken from a task, and not caught.
    asking = asyncio.ensure_future(client.collective_rpc(method, args=arguments))
    try:
        await asyncio.wait((asking,), timeout=ANSWER_S)
    finally:
        asking.cancel()
    trouble = asking.exception() if asking.done() else TimeoutError(f"no answer within {ANSWER_S:g} s")
    if trouble is not None:
        raise FerryError("vLLM's workers did not answer", found=str(trouble))
    return list(asking.result())
