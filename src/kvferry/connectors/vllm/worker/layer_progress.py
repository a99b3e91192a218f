"""How far a step of vLLM's is in its layers: which states of the description are computed of all its tokens."""

from __future__ import annotations

from collections.abc import Mapping

# A source cuts a model into as many pieces: if it is told more often, it has nothing to send.
NUM_WORDS = 8


class LayerProgress:
    """How far one step at a time is. `ends` has for each layer, in the order of the layout, the number of states up to
    its own. It is empty where nobody wants to know."""

    def __init__(self, ends: Mapping[str, int]) -> None:
        self._ends = ends
        self._num_states = max(ends.values(), default=0)
        self._stride = max(1, -(-self._num_states // NUM_WORDS))
        self._ended: set[str] = set()
        self._num_told = 0

    def begin(self) -> None:
        """Begin a step."""
        self._ended.clear()
        self._num_told = 0

    def ended(self, layer: str) -> int:
        """Note that a layer has ended. Return how many of the first states are there, 0 while that is hardly a change.

        Layers that end in another order than that of the layout count when those before them have ended.
        """
        self._ended.add(layer)
        found = 0
        for name, num_states in self._ends.items():
            if name not in self._ended:
                break
            found = num_states
        is_more = found > self._num_told and found // self._stride > self._num_told // self._stride
        if not is_more and not self._num_told < found == self._num_states:
            return 0
        self._num_told = found
        return found
