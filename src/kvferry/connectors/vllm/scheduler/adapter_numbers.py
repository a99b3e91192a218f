"""Which adapter each of vLLM's numbers stands for.

vLLM gives an adapter that is loaded in place of another one the same number. Requests that came before go on with the
new weights, whatever path they name, and some of their cache is of the old ones.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.lora.request import LoRARequest

from kvferry.errors import RequestError

MAX_KNOWN = 16_384


@dataclass(slots=True)
class _Number:
    """Stands for the adapter at `path`. `current` and `stale` are the ids of the requests that go on, with the adapter
    and with one that had the number before."""

    path: str
    current: set[str] = field(default_factory=set)
    stale: set[str] = field(default_factory=set)


class AdapterNumbers:
    """Hears of what is loaded, and of requests that come and go."""

    def __init__(self) -> None:
        self._numbers: dict[int, _Number] = {}

    def load(self, adapter: LoRARequest) -> None:
        """vLLM is told to load it."""
        number = self._of(adapter)
        if number.path != adapter.lora_path:
            number.path = adapter.lora_path
            number.stale |= number.current
            number.current = set()

    def begin(self, request_id: str, adapter: LoRARequest) -> None:
        """A request with it has arrived."""
        number = self._of(adapter)
        (number.current if number.path == adapter.lora_path else number.stale).add(request_id)

    def end(self, request_id: str, adapter: LoRARequest) -> None:
        """A request with it has ended. Unknown ones are fine."""
        number = self._of(adapter)
        number.current.discard(request_id)
        number.stale.discard(request_id)

    def check(self, adapter: LoRARequest) -> None:
        """Raises RequestError where it is not known whose weights vLLM computes with. A request that came before
        another adapter was loaded in place may have vLLM load its own again, for all that share a step with it."""
        number = self._of(adapter)
        if number.stale or number.path != adapter.lora_path:
            what = "another adapter has been loaded in its place"
            raise RequestError(what, found=f"{len(number.stale)} requests of one before", hint="try again later")

    def _of(self, adapter: LoRARequest) -> _Number:
        known = self._numbers
        if adapter.lora_int_id not in known and len(known) >= MAX_KNOWN:
            # One that nobody uses, if there is any among the oldest.
            del known[next((key for key, number in known.items() if not number.current), next(iter(known)))]
        return known.setdefault(adapter.lora_int_id, _Number(adapter.lora_path))
