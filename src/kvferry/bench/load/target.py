"""The server that is measured: its requests, and the model that it serves."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec

from kvferry.bench.load.answer import refusal
from kvferry.bench.load.workload import Endpoint, PlannedRequest, Prompt
from kvferry.errors import ConfigurationError
from kvferry.http.client_errors import KEEP_ALIVE_S, client_error_text

TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Target:
    """A base URL without `/v1`, a model, and what goes into every request.

    Prompts are token ids, of exact length, unless they are to be text; chat knows only text. With `may_stop` the model
    may end its answer early, else it is told to ignore its end token, which not every server understands.
    """

    url: str
    model: str
    endpoint: Endpoint = Endpoint.COMPLETIONS
    as_text: bool = False
    may_stop: bool = False
    headers: dict[str, str] = field(default_factory=dict)

    def body(self, planned: PlannedRequest) -> bytes:
        """The request for one answer, streamed and with its token counts."""
        fields: dict[str, Any] = {
            "model": self.model,
            "max_tokens": planned.output_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return msgspec.json.encode(
            fields | self._prompt(planned.prompt) | ({} if self.may_stop else {"ignore_eos": True})
        )

    def _prompt(self, prompt: Prompt) -> dict[str, Any]:
        if self.endpoint is Endpoint.CHAT:
            return {"messages": [{"role": "user", "content": prompt.text()}]}
        return {"prompt": prompt.text() if self.as_text else prompt.token_ids()}


def open_session(headers: dict[str, str], timeout_s: float) -> aiohttp.ClientSession:
    """A session with as many connections as there are requests: none waits for another."""
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S)
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    return aiohttp.ClientSession(connector=connector, timeout=timeout, headers=headers)


async def served_model(url: str, wanted: str, headers: dict[str, str]) -> str:
    """The name of the model to ask for: `wanted`, or the first one that is served when that is empty.

    Raises ConfigurationError when there is no server, or when it does not serve that model.
    """
    if not url.startswith(("http://", "https://")):
        expected = "a URL with http:// or https://, such as http://127.0.0.1:8000"
        raise ConfigurationError("invalid server URL", found=url, expected=expected)
    names = await _models(url, headers, is_needed=not wanted)
    if not names and not wanted:
        raise ConfigurationError("the server lists no models", found=f"{url}/v1/models", hint="give --model")
    if names and wanted and wanted not in names:
        hint = "leave --model out to take the first"
        raise ConfigurationError(
            "the server does not have this model", found=wanted, expected=" or ".join(names), hint=hint
        )
    return wanted or names[0]


async def _models(url: str, headers: dict[str, str], *, is_needed: bool) -> list[str]:
    """Nothing where the server does not know the path."""
    try:
        async with open_session(headers, TIMEOUT_S) as session, session.get(f"{url}/v1/models") as response:
            body = await response.read()
    except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
        raise ConfigurationError(
            "cannot reach the server",
            found=client_error_text(error),
            expected="an OpenAI server, at a URL such as http://127.0.0.1:8000, without /v1",
            hint="start one with: kvferry up",
        ) from None
    if response.status in (401, 403):
        was_shown = any(name.lower() == "authorization" for name in headers)
        raise ConfigurationError(
            "the server does not take this API key" if was_shown else "the server needs an API key",
            found=f"HTTP {response.status} from {url}/v1/models",
            hint=f"set the environment variable KVFERRY_API_KEY{' to another one' if was_shown else ''}",
        )
    if is_needed and response.status not in (200, 404):
        what, found = "the server does not say which models it has", refusal(response.status, body)
        raise ConfigurationError(what, found=f"{url}/v1/models: {found}", hint="does it serve? Otherwise give --model")
    try:
        models = msgspec.json.decode(body, type=Models) if response.status == 200 else Models()
    except msgspec.DecodeError:
        return []
    return [model.id for model in models.data]


class Model(msgspec.Struct, frozen=True):
    id: str


class Models(msgspec.Struct, frozen=True):
    data: tuple[Model, ...] = ()
