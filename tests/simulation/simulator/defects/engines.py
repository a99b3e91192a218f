"""Engines with one defect each, in how they name prompts and in what they keep."""

from __future__ import annotations

from kvferry.plan.description.prompt import Prompt
from simulator.state.memory import RankMemory
from simulator.state.prefix_cache import PrefixCache
from simulator.state.prompts import Naming, PromptSpec
from simulator.state.rank import Fetching


class TokensOnly(Naming):
    """Does not look at images."""

    def _prompt(self, spec: PromptSpec, num_tokens: int) -> Prompt:
        return Prompt.of(range(num_tokens))


class KeepsFailed(PrefixCache):
    """Keeps whatever has been fetched, valid or not."""

    def ended(self, memory: RankMemory, fetching: Fetching) -> None:
        """However it has ended."""
        self._keep(memory, fetching)
