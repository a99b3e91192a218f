"""Turns what a client sends as a prompt into token ids."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any, TypeVar

import jinja2

from kvferry.connectors.transformers import render, variables_of
from kvferry.embedded.engine.async_engine import Engine
from kvferry.embedded.request.chat import OPTIONAL, ChatPrompt, WatchedMessage, in_lines, refuse_unread, takes_parts
from kvferry.embedded.request.parse import PromptInput, TextPrompt
from kvferry.errors import PromptTooLongError, RequestError

Result = TypeVar("Result")

# In characters, or tokens. A shorter text is tokenised sooner than a thread is asked to do it.
SHORT_TEXT = 1 << 16
MIN_SIZE = 64


class Prompts:
    """Turns prompts into token ids. Many megabytes take many seconds, in which others must be answered."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        # A thread of its own: name lookups share the loop's, and the end of the process waits for one text at most.
        self._thread = ThreadPoolExecutor(1, "tokenising")

    def close(self) -> None:
        """Stop tokenising long texts. One that has been begun is finished."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def token_ids(self, prompt: PromptInput, is_limited: bool = False) -> tuple[int, ...]:
        """Return a prompt's token ids. Raises RequestError when messages do not fit the model's chat template, and
        PromptTooLongError, if `is_limited`, for a text of which the engine could not take the tokens however long each
        is: others wait for theirs meanwhile."""
        match prompt:
            case tuple():
                return prompt
            case TextPrompt():
                text = prompt.text
            case ChatPrompt():
                text = await self.off_loop(prompt.size, lambda: self._rendered(prompt))
        if is_limited:
            self._check_length(text)
        return await self.off_loop(len(text), lambda: self._ids(text, prompt.add_special_tokens))

    def _check_length(self, text: str) -> None:
        most = self._engine.max_tokens * self._longest_token
        if len(text) > most:
            raise PromptTooLongError(
                "the prompt is too long for this engine",
                found=f"{len(text)} characters",
                expected=f"at most {self._engine.max_tokens} tokens, which are {most} characters at most",
                hint="shorten the prompt",
                param="prompt",
            )

    @cached_property
    def _longest_token(self) -> int:
        return max(map(len, self._engine.tokenizer.get_vocab()))

    async def token_strs(self, token_ids: tuple[int, ...]) -> list[str]:
        """Each token as the tokenizer's vocabulary writes it."""
        convert = self._engine.tokenizer.convert_ids_to_tokens
        return await self.off_loop(len(token_ids), lambda: list(map(str, convert(list(token_ids)))))

    async def text(self, token_ids: tuple[int, ...], field: str = "tokens") -> str:
        """Return the text of these tokens, special ones included. `field` is where they were sent. Raises RequestError
        for an id outside the vocabulary."""
        self._engine.limits.check_ids(field, token_ids)
        decode = self._engine.tokenizer.decode
        return await self.off_loop(len(token_ids), lambda: str(decode(list(token_ids), skip_special_tokens=False)))

    async def text_of(self, prompt: PromptInput) -> str:
        """A completion's prompt as it was written, or the text of its tokens. Raises RequestError as `text`."""
        if isinstance(prompt, tuple):
            return await self.text(prompt, "prompt")
        return prompt.text if isinstance(prompt, TextPrompt) else ""

    async def bad_words_ids(self, words: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        """The ids of each word as the start of a text, and within one. Raises RequestError for a word without any."""
        return await self.off_loop(sum(map(_size, words)), lambda: self._of_words(words))

    def _of_words(self, words: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        found: list[tuple[int, ...]] = []
        for word in words:
            start, within = (self._ids(prefix + word.lstrip(), add_special_tokens=False) for prefix in ("", " "))
            if not start:
                raise RequestError("a word of bad_words has no tokens", found=repr(word)[:80], param="bad_words")
            found += [start, within]
        return tuple(found)

    def _ids(self, text: str, add_special_tokens: bool) -> tuple[int, ...]:
        return tuple(self._engine.tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"])

    async def off_loop(self, size: int, work: Callable[[], Result]) -> Result:
        """Do the work in a thread if `size` is large, else at once, after others have had their turn."""
        if size <= SHORT_TEXT:
            await asyncio.sleep(0)
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _rendered(self, chat: ChatPrompt) -> str:
        tokenizer = self._engine.tokenizer
        try:
            messages = self._with_parts(chat.messages)
            watched = [WatchedMessage(message) for message in messages]
            self._check_values(chat.template_values)
            text = tokenizer.apply_chat_template(
                messages,
                tokenize=False,
                add_generation_prompt=chat.add_generation_prompt,
                continue_final_message=chat.continue_final_message,
                **chat.template_values,
            )
            if any(message.keys() & OPTIONAL for message in messages):
                render(
                    tokenizer, watched, {"add_generation_prompt": chat.add_generation_prompt, **chat.template_values}
                )
        except (ValueError, TypeError, RecursionError, jinja2.TemplateError) as error:
            raise RequestError(
                "the messages do not fit the model's chat template",
                found=str(error),
                hint="use /v1/completions with a prompt of your own",
                param="messages",
            ) from None
        refuse_unread(watched)
        return str(text)

    def _with_parts(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Messages whose parts are as the model's chat template takes them."""
        is_plain = all(isinstance(message["content"], str) for message in messages)
        if is_plain or takes_parts(self._engine.tokenizer.get_chat_template()):
            return messages
        return [in_lines(message) for message in messages]

    def _check_values(self, values: dict[str, Any]) -> None:
        """Refuse a name that the template does not have, since it would be ignored, and one that transformers has,
        which says how to render. Raises RequestError."""
        if not values:
            return
        tokenizer = self._engine.tokenizer
        taken = {
            "messages",
            *inspect.signature(tokenizer.apply_chat_template).parameters,
            *tokenizer.special_tokens_map,
        }
        names = variables_of(tokenizer.get_chat_template()) - taken
        for name in values:
            if name not in names:
                raise RequestError(
                    "a name in chat_template_kwargs is not supported: the model's chat template does not read it",
                    found=repr(name)[:80],
                    expected="a variable of the chat template, such as enable_thinking where it has that",
                    hint="leave it out",
                    param="chat_template_kwargs",
                )


def _size(text: str) -> int:
    """The size of a word, in characters. Each costs something besides its letters."""
    return MIN_SIZE + len(text)
