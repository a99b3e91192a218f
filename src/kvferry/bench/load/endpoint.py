"""Which of the two generating endpoints is asked."""

from __future__ import annotations

from enum import StrEnum


class Endpoint(StrEnum):
    """By the words of the command line."""

    COMPLETIONS = "completions"
    CHAT = "chat"

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self is Endpoint.CHAT else "/v1/completions"
