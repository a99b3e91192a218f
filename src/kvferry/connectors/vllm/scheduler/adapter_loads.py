"""Tells the scheduler's half which adapters vLLM loads, before it loads them. No hook of connectors does.

An adapter is loaded when vLLM's server starts or is told to, which may be long before the first request with it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import TYPE_CHECKING, Protocol
from weakref import WeakSet

from vllm.lora.request import LoRARequest

if TYPE_CHECKING:
    from vllm.v1.engine.core import EngineCore


class Listener(Protocol):
    """Who wants to know."""

    def loading(self, adapter: LoRARequest) -> AbstractContextManager[None]:
        """Its files are read, if all goes well, while the context is open."""


AddLora = Callable[["EngineCore", LoRARequest], bool]

_listeners: WeakSet[Listener] = WeakSet()


def tell_of_loads(listener: Listener) -> None:
    """For as long as the listener lives. In the process of vLLM's engine core, while that is being made."""
    # Only that process needs it, and has it.
    from vllm.v1.engine.core import EngineCore

    _listeners.add(listener)
    if not hasattr(EngineCore.add_lora, "__wrapped__"):
        EngineCore.add_lora = _told(EngineCore.add_lora)


def _told(add_lora: AddLora) -> AddLora:
    @functools.wraps(add_lora)
    def told(engine_core: EngineCore, lora_request: LoRARequest) -> bool:
        with ExitStack() as loading:
            for listener in list(_listeners):
                loading.enter_context(listener.loading(lora_request))
            return add_lora(engine_core, lora_request)

    return told
