"""Why the engines have chosen the transport between them: `/kvferry/info` of our own engine says so."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterable
from typing import Any

from kvferry.errors import RequestError
from kvferry.system.os_errors import os_error_text

ANSWER_S = 30.0


def why_chosen(urls: Iterable[str], transport: str) -> str:
    """What the first engine measured that has met another over this transport; empty when none has.

    Whoever moves the bytes has measured, which may be either side. Raises RequestError when an engine does not answer.
    """
    peers = (peer for url in urls for peer in _info(url).get("peers", ()))
    return next((str(peer["choice"]) for peer in peers if peer["transport"] == transport), "")


def _info(url: str) -> dict[str, Any]:
    try:
        with urllib.request.urlopen(f"{url}/kvferry/info", timeout=ANSWER_S) as answer:
            found: dict[str, Any] = json.load(answer)
            return found
    except (OSError, ValueError) as error:
        raise RequestError(f"{url} does not report its peers", found=os_error_text(error)) from error
