"""Ask a router, ask one engine alone, and compare: the same tokens, or something is wrong."""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from kvferry.errors import RequestError
from kvferry.http.openai import REPORT_HEADER
from kvferry.system import os_error_text

SILENCE_S = 300.0
HEADERS = {"content-type": "application/json", REPORT_HEADER: "true"}
PATH, CACHE, TIMING = "x-kvferry-path", "x-kvferry-cache", "server-timing"
PROMPT = "The ferry leaves the harbour at dawn, and nobody who missed it at night must lose a box on the way. " * 8
MAX_TOKENS = 16
# What a report says of the transfer, in the order in which it is shown.
REPORTED = ("tokens_received", "tokens_computed", "bytes", "transport")


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
    """What came back: text, token ids where the engine names them, the number of prompt tokens, kvferry's report on the
    transfer, and the headers, in lower case."""

    text: str
    token_ids: tuple[int, ...]
    prompt_tokens: int
    report: dict[str, Any]
    headers: Mapping[str, str]

    @property
    def path(self) -> str:
        """The router's word for how the request went: `disaggregated` or `decode-only`, empty from an engine."""
        return self.headers.get(PATH, "")


def silent(text: str) -> None:
    """Show nothing of an answer while it comes."""


def ask(url: str, question: Question, show: Callable[[str], None] = silent, *, api_keys: Sequence[str] = ()) -> Answer:
    """Stream one answer of the server at `url`; `show` gets the text as it comes, and the server the first of the API
    keys. Raises RequestError with what the server says, or with why it does not answer."""
    text, token_ids = "", list[int]()
    report, usage = dict[str, Any](), dict[str, Any]()
    headers: dict[str, str] = {}
    for chunk in _chunks(url, question.body(), api_keys, headers):
        if "error" in chunk:
            raise _refused(json.dumps(chunk).encode(), url)
        for choice in chunk.get("choices", []):
            show(choice["text"])
            text += choice["text"]
            token_ids += choice.get("token_ids") or []
        report = chunk.get("kvferry") or report
        usage = chunk.get("usage") or usage
    return Answer(text, tuple(token_ids), int(usage.get("prompt_tokens", 0)), report, headers)


def _chunks(url: str, body: bytes, api_keys: Sequence[str], headers: dict[str, str]) -> Iterator[dict[str, Any]]:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=SILENCE_S)
    try:
        keys = dict(("authorization", f"Bearer {key}") for key in api_keys[:1])
        connection.request("POST", "/v1/completions", body, HEADERS | keys)
        response = connection.getresponse()
        if response.status != 200:
            raise _refused(response.read(), url)
        headers |= {name.lower(): value for name, value in response.headers.items()}
        for line in response:
            if line.startswith(b"data: {"):
                yield json.loads(line[len(b"data: ") :])
    except (OSError, http.client.HTTPException, json.JSONDecodeError) as error:
        raise RequestError(f"no answer from {url}", found=os_error_text(error)) from error
    finally:
        connection.close()


def _refused(body: bytes, url: str) -> RequestError:
    """With the server's own words, of which a proxy's page is one kind."""
    try:
        found = str(json.loads(body)["error"]["message"])
    except (ValueError, TypeError, KeyError):
        found = body.decode(errors="replace")
    return RequestError(f"{url} refused the prompt", found=found)


@dataclass(frozen=True, slots=True)
class Comparison:
    """The answer that came through a router, and that of its decode engine alone. As text it is a table for people."""

    answer: Answer
    alone: Answer

    @property
    def received(self) -> bool:
        """Whether the cache came from a prefill engine."""
        return self.answer.headers.get(CACHE) == "received"

    @property
    def equal(self) -> bool:
        """Whether both answers have the same text and tokens."""
        return (self.answer.text, self.answer.token_ids) == (self.alone.text, self.alone.token_ids)

    @property
    def passed(self) -> bool:
        """Whether a cache came, and made no difference."""
        return self.received and self.equal

    def __str__(self) -> str:
        headers = {name: value for name in (PATH, CACHE, TIMING) if (value := self.answer.headers.get(name))}
        report = {name: self.answer.report[name] for name in REPORTED if name in self.answer.report}
        found = "equal to" if self.equal else "DIFFERENT FROM"
        compared = f"{found} the decode engine's answer without a transfer"
        lines = {"answer": repr(self.answer.text), **headers, **report, "compared": compared}
        return "\n".join(f"{name:<15} {value}" for name, value in lines.items())


def compare(
    router_url: str, decode_url: str, model: str, prompt: str = PROMPT, *, api_keys: Sequence[str] = ()
) -> Comparison:
    """Ask a decode engine alone, then the router in front of it, each for `MAX_TOKENS` tokens of the likeliest.

    Neither is answered from a prefix that the other has left in a cache. Raises what `ask` does.
    """
    alone, answer = (
        ask(url, Question(model, prompt, MAX_TOKENS, salt), api_keys=api_keys)
        for url, salt in ((decode_url, "alone"), (router_url, "transferred"))
    )
    return Comparison(answer, alone)
