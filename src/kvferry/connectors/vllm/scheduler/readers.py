"""Requests of this engine that refer to one cache, as the `n` answers to one prompt do: one of them fetches it.

The others wait, and find it in vLLM's own prefix cache; without one they compute it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from kvferry import Prompt, Reference


class Turn(Enum):
    """What a request does about its cache. `READ`: nothing, for another request has fetched it."""

    FETCH = auto()
    WAIT = auto()
    READ = auto()


@dataclass(slots=True)
class _Readers:
    """Requests that read one cache. `undecided` have no blocks yet. `fetching` has the one that fetches by its prompt,
    and `read` the prompts of those that have fetched: if they differ, only one is that of the cache."""

    members: set[str] = field(default_factory=set)
    undecided: set[str] = field(default_factory=set)
    fetching: dict[Prompt, str] = field(default_factory=dict)
    read: set[Prompt] = field(default_factory=set)

    def forget(self, request_id: str) -> list[Prompt]:
        """Note that a request fetches no more. Return the prompt that it fetched, if it did."""
        prompts = [prompt for prompt, fetching in self.fetching.items() if fetching == request_id]
        for prompt in prompts:
            del self.fetching[prompt]
        return prompts


class Readers:
    """Which cache each request reads, by request id, from arrival to end. Unknown ids are alone with their cache."""

    def __init__(self) -> None:
        self._of_cache: dict[Reference, _Readers] = {}
        self._caches: dict[str, Reference] = {}
        self._missing: dict[str, int] = {}

    def arrive(self, request_id: str, cache: Reference) -> None:
        """Add a request that refers to this cache, and has no blocks yet."""
        self._caches[request_id] = cache
        readers = self._of_cache.setdefault(cache, _Readers())
        readers.members.add(request_id)
        readers.undecided.add(request_id)

    def turn(self, request_id: str, prompt: Prompt) -> Turn:
        """What a request does now. If prompts with one reference differ, each tries alone, and hears what is wrong."""
        for readers in self._of(request_id):
            if prompt in readers.read:
                return Turn.READ
            if prompt in readers.fetching:
                return Turn.WAIT
        return Turn.FETCH

    def fetch(self, request_id: str, prompt: Prompt) -> None:
        """Note that a request fetches."""
        for readers in self._of(request_id):
            readers.undecided.discard(request_id)
            readers.fetching.setdefault(prompt, request_id)

    def fetched(self, request_id: str) -> None:
        """Note that a request's blocks are filled, by the fetch or, where that failed, by what vLLM computes."""
        for readers in self._of(request_id):
            readers.read.update(readers.forget(request_id))

    def found(self, request_id: str, num_missing: int) -> None:
        """Note that it was a request's turn to `READ`, and how many fetchable tokens the prefix cache does not have."""
        self._missing[request_id] = num_missing

    def num_missing(self, request_id: str) -> int:
        """How many tokens that another request has fetched this one has not found."""
        return self._missing.get(request_id, 0)

    def is_nobodys(self, request_id: str) -> bool:
        """Whether, as this request fetches nothing, no other one here does or will: the source may drop the cache."""
        for readers in self._of(request_id):
            readers.undecided.discard(request_id)
            return not readers.undecided and not readers.fetching and not readers.read
        return True

    def end(self, request_id: str) -> None:
        """The request has ended. If it had not fetched yet, another one may."""
        for readers in self._of(request_id):
            readers.members.discard(request_id)
            readers.undecided.discard(request_id)
            readers.forget(request_id)
            if not readers.members:
                del self._of_cache[self._caches[request_id]]
        self._caches.pop(request_id, None)
        self._missing.pop(request_id, None)

    def _of(self, request_id: str) -> tuple[_Readers, ...]:
        cache = self._caches.get(request_id)
        return () if cache is None else (self._of_cache[cache],)
