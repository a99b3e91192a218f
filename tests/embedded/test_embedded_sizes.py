"""What is far too long is refused before it is built or looked at item by item: others wait for their answers."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from embedded_server import Served

from kvferry.embedded.request import parse
from kvferry.embedded.request.bodies import MAX_BAD_WORDS, MAX_CHOICES, MAX_TOKEN_IDS
from kvferry.errors import PromptTooLongError, RequestError

COMPLETIONS = "/v1/completions"
LONGEST = 100


def fail(*_: object, **__: object) -> None:
    raise AssertionError("this was to be refused before")


def decode(fields: dict[str, Any]) -> parse.GenerationRequest:
    return parse.decode_completion(msgspec.json.encode({"prompt": "a"} | fields), LONGEST)


@pytest.mark.parametrize(
    ("unused", "fields", "found"),
    [
        ("TextPrompt", {"prompt": [""] * (MAX_CHOICES + 1)}, f"{MAX_CHOICES + 1} prompts"),
        ("decode_body", {"prompt": [[1]] * (MAX_CHOICES + 1)}, f"{MAX_CHOICES + 1} prompts"),
        ("_token_ids", {"prompt": [1] * LONGEST}, f"{LONGEST} prompt tokens"),
        ("_token_ids", {"prompt": [[1], [1] * LONGEST]}, f"{LONGEST} prompt tokens"),
        ("decode_body", {"bad_words": ["a"] * (MAX_BAD_WORDS + 1)}, f"at least {MAX_BAD_WORDS + 1} words"),
    ],
)
def test_too_many_items_are_counted_and_not_built(
    monkeypatch: pytest.MonkeyPatch, unused: str, fields: dict[str, Any], found: str
) -> None:
    monkeypatch.setattr(parse, unused, fail)
    with pytest.raises(RequestError) as refused:
        decode(fields)
    assert (refused.value.found, refused.value.param) == (found, next(iter(fields)))
    assert isinstance(refused.value, PromptTooLongError) == found.endswith("prompt tokens")


@pytest.mark.parametrize(
    "fields",
    [
        {"allowed_token_ids": [1] * (MAX_TOKEN_IDS + 1)},
        {"stop_token_ids": [1] * (MAX_TOKEN_IDS + 1)},
        {"logit_bias": {str(i): 1 for i in range(MAX_TOKEN_IDS + 1)}},
        {"bad_words": ['"'] * (MAX_BAD_WORDS + 1)},
    ],
)
def test_a_field_that_names_more_than_there_can_be_is_refused(fields: dict[str, Any]) -> None:
    """Words of quotes are not counted before they are built, and are counted then."""
    (name,) = fields
    with pytest.raises(RequestError, match=f"{name} is invalid") as refused:
        decode(fields)
    assert refused.value.param == name


def test_as_much_as_may_be_is_taken() -> None:
    assert len(decode({"prompt": [[1] * (LONGEST - 1)] * MAX_CHOICES}).prompts) == MAX_CHOICES
    assert len(decode({"prompt": ['[["'] * MAX_CHOICES}).prompts) == MAX_CHOICES
    assert len(decode({"prompt": ["[[" * MAX_CHOICES]}).prompts) == 1
    assert len(decode({"prompt": "[[" * MAX_CHOICES}).prompts) == 1
    assert len(decode({"bad_words": ['a"\\'] * MAX_BAD_WORDS}).sampling.bad_words) == MAX_BAD_WORDS


def test_ids_that_no_context_has_room_for_are_a_400(decoder: Served) -> None:
    status, answer = decoder.ask(COMPLETIONS, {"prompt": [5] * decoder.engine.max_tokens})
    assert (status, answer["error"]["param"]) == (400, "prompt")
    assert f"fewer than {decoder.engine.max_tokens}" in answer["error"]["message"]
