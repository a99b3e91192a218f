"""Ask the router, ask one engine alone, and compare: the same tokens, or something is wrong."""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from kvferry.cli import environment
from kvferry.errors import RequestError
from kvferry.http.openai import REPORT_HEADER
from kvferry.system import os_error_text

SILENCE_S = 300.0
HEADERS = {"content-type": "application/json", REPORT_HEADER: "true"}


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt, as text or as token ids. A `temperature` above 0 draws the tokens, the same ones with the same `seed`.

    Only questions with the same `salt` share cached prefixes on engines that have a prefix cache.
    """

    model: str
    prompt: str | list[int]
    max_tokens: int
    salt: str = ""
    temperature: float = 0.0
    seed: int = 0

    def body(self) -> bytes:
        """The request body for `/v1/completions`, streaming, with token ids."""
        fields = {
            "model": self.model,
            "prompt": self.prompt,
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "seed": self.seed,
            "stream": True,
            "return_token_ids": True,
            "stream_options": {"include_usage": True},
            **({"cache_salt": self.salt} if self.salt else {}),
        }
        return json.dumps(fields).encode()


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back: text, token ids, the number of prompt tokens, and the transfer report of the engine.

    `path` is the router's word for how the request went: `disaggregated` or `decode-only`, empty from an engine.
    """

    text: str
    token_ids: tuple[int, ...]
    prompt_tokens: int
    report: dict[str, Any]
    path: str


def ask(url: str, question: Question, show: Callable[[str], None]) -> Answer:
    """Stream one answer; `show` gets the text as it comes. Raises RequestError with what the server says."""
    text, token_ids = "", list[int]()
    report, usage = dict[str, Any](), dict[str, Any]()
    paths: list[str] = []
    for chunk in _chunks(url, question.body(), paths):
        if "error" in chunk:
            raise _refused(chunk, url)
        for choice in chunk.get("choices", []):
            show(choice["text"])
            text += choice["text"]
            token_ids += choice.get("token_ids") or []
        report = chunk.get("kvferry") or report
        usage = chunk.get("usage") or usage
    return Answer(text, tuple(token_ids), int(usage.get("prompt_tokens", 0)), report, "".join(paths))


def _chunks(url: str, body: bytes, paths: list[str]) -> Iterator[dict[str, Any]]:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=SILENCE_S)
    try:
        keys = dict(("authorization", f"Bearer {key}") for key in environment.api_keys())
        connection.request("POST", "/v1/completions", body, HEADERS | keys)
        response = connection.getresponse()
        if response.status != 200:
            raise _refused(json.loads(response.read()), url)
        paths.append(response.headers.get("x-kvferry-path", ""))
        for line in response:
            if line.startswith(b"data: {"):
                yield json.loads(line[len(b"data: ") :])
    except (OSError, http.client.HTTPException, json.JSONDecodeError) as error:
        raise RequestError(f"no answer from {url}", found=os_error_text(error)) from error
    finally:
        connection.close()


def _refused(body: dict[str, Any], url: str) -> RequestError:
    error = body.get("error", {})
    return RequestError(f"{url} refused the prompt", found=str(error.get("message", body)))
