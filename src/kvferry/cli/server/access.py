"""Who may use a server that a command starts: its options, and the environment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvferry.cli import environment
from kvferry.http.access import Access


def access_of(given: Mapping[str, Any]) -> Access:
    """From the options of `route` or `serve`, by their names. Raises ConfigurationError for a key that is none."""
    return Access(
        api_keys=tuple(given["api_key"]) or environment.api_keys(),
        origins=tuple(given["allowed_origins"]),
        methods=tuple(given["allowed_methods"]),
        headers=tuple(given["allowed_headers"]),
        credentials=given["allow_credentials"],
    )
