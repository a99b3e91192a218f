"""What an engine does for one request while others wait for their turn on the event loop."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace

import pytest

from kvferry.embedded.request.prompts import SHORT_TEXT, ChatPrompt, Prompts, TextPrompt


class Tokenizer:
    """Notes in which thread it works."""

    def __init__(self) -> None:
        self.threads: list[int] = []

    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        self.threads.append(threading.get_ident())
        return {"input_ids": [1]}

    def apply_chat_template(self, messages: object, **options: object) -> str:
        self.threads.append(threading.get_ident())
        return "x"


@pytest.fixture
def tokenizer() -> Tokenizer:
    return Tokenizer()


def asked(tokenizer: Tokenizer, *prompts: TextPrompt | ChatPrompt, bad_words: tuple[str, ...] = ()) -> int:
    """Tokenise all of it; how many turns somebody else has had meanwhile."""

    async def main() -> int:
        turns = 0

        async def other() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        prompts_of = Prompts(SimpleNamespace(tokenizer=tokenizer))  # type: ignore[arg-type]
        beside = asyncio.create_task(other())
        for prompt in prompts:
            await prompts_of.token_ids(prompt)
        await prompts_of.bad_words_ids(bad_words)
        beside.cancel()
        prompts_of.close()
        return turns

    return asyncio.run(main())


def test_others_have_a_turn_between_any_two_short_prompts(tokenizer: Tokenizer) -> None:
    assert asked(tokenizer, *[TextPrompt("short")] * 50) >= 50


@pytest.mark.parametrize(("size", "is_elsewhere"), [(SHORT_TEXT, False), (SHORT_TEXT + 1, True)])
def test_chats_that_are_long_are_written_out_elsewhere(tokenizer: Tokenizer, size: int, is_elsewhere: bool) -> None:
    """Whatever it is that makes their bodies long."""
    asked(tokenizer, ChatPrompt([{"role": "user", "content": "x"}], size=size))
    assert (tokenizer.threads[0] != threading.get_ident()) is is_elsewhere


def test_many_bad_words_are_read_elsewhere(tokenizer: Tokenizer) -> None:
    asked(tokenizer, bad_words=("word",) * (SHORT_TEXT // 32))
    assert threading.get_ident() not in tokenizer.threads
