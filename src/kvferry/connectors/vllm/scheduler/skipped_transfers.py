"""Caches that are not transferred on purpose: their prompts are computed where they are answered, and counted."""

from __future__ import annotations

import logging
from typing import Literal

from kvferry.connectors.vllm.stats import FerryStats
from kvferry.connectors.vllm_middleware.worker_reports import FetchOutcome

logger = logging.getLogger(__name__)

ALREADY_READ = "already_read"
"""Another request of this engine has read the cache, and vLLM's prefix cache does not have it."""
STEP_UNDER_WAY = "step_under_way"
"""A step that was scheduled before the last token was known writes over what there would be to read."""
PAST_PROMPT = "past_prompt"
"""What the layers keep has gone on with the answer, from where it would have to be read."""
NOT_A_CONSUMER = "not_a_consumer"
"""The role that this server was given is to fetch nothing."""


class Declined:
    """What the scheduler's half has decided since it was last asked."""

    def __init__(self) -> None:
        self._stats = FerryStats()

    def offer(self, request_id: str, reason: str, words: str) -> None:
        """This engine does not offer a cache that was asked for."""
        self._say("source", request_id, reason, f"its cache is not offered: {words}")

    def fetch(self, request_id: str, reason: str, words: str) -> None:
        """This engine does not fetch a cache that was offered."""
        self._say("target", request_id, reason, f"its prompt is computed here: {words}")
        self._stats.told(request_id, FetchOutcome(str(reason), words))

    def take_stats(self) -> FerryStats:
        """What was declined since the last call."""
        stats, self._stats = self._stats, FerryStats()
        return stats

    def _say(self, side: Literal["source", "target"], request_id: str, reason: str, words: str) -> None:
        logger.info("request %s: %s: %s", request_id, reason, words)
        self._stats.declined(side, str(reason))
