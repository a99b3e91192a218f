"""What an engine keeps of the prompts that it has gone on from: later requests are answered from it."""

from __future__ import annotations

from simulator.state.memory import RankMemory
from simulator.state.rank import Fetching
from simulator.violation import Violation


class PrefixCache:
    """Of one rank of one incarnation. A prompt is found by everything that decides its cache."""

    def __init__(self) -> None:
        self._num_wrong: dict[int, int] = {}

    def ended(self, memory: RankMemory, fetching: Fetching) -> None:
        """A fetch is over, and its blocks are about to be given back: they are kept if they were found valid."""
        if fetching.status == "fetched":
            self._keep(memory, fetching)

    def check(self, name: str, salt: int) -> None:
        """A request for this prompt comes without any reference: what is kept of it must be its own."""
        if num_wrong := self._num_wrong.get(salt, 0):
            raise Violation(f"{name}: its prefix cache has {num_wrong} bytes of another cache under a prompt's name")

    def _keep(self, memory: RankMemory, fetching: Fetching) -> None:
        if fetching.tables:
            num_wrong = memory.wrong_bytes(fetching.wanted.salt, fetching.tables, fetching.wanted.ranges)
            self._num_wrong[fetching.wanted.salt] = max(num_wrong, self._num_wrong.get(fetching.wanted.salt, 0))
