"""`/tokenize` and `/detokenize` over a real socket: the tokens that a completion or a chat computes, and their text."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from embedded_server import Served
from embedded_support import DEADLINE_S

from kvferry.embedded.request.prompts import SHORT_TEXT

TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"
PROMPT = "The ferry crosses the river when"
MESSAGES = [{"role": "user", "content": "Where does the ferry go?"}]
BEGUN = [*MESSAGES, {"role": "assistant", "content": "The ferry goes to"}]


def tokens_of(decoder: Served, body: dict[str, Any]) -> list[int]:
    status, answer = decoder.ask(TOKENIZE, body)
    assert (status, answer["count"]) == (200, len(answer["tokens"]))
    return answer["tokens"]


@pytest.mark.parametrize("body", [{"prompt": PROMPT}, {"messages": MESSAGES}], ids=["text", "messages"])
def test_the_tokens_are_those_that_a_request_computes(decoder: Served, body: dict[str, Any]) -> None:
    path = "/v1/completions" if "prompt" in body else "/v1/chat/completions"
    tokens = tokens_of(decoder, body)
    asked = {"max_tokens": 4, "return_token_ids": True}
    _, expected = decoder.ask(path, body | asked)
    _, answer = decoder.ask("/v1/completions", {"prompt": tokens} | asked)
    assert answer["choices"][0]["token_ids"] == expected["choices"][0]["token_ids"]
    assert expected["usage"]["prompt_tokens"] == len(tokens)


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenised(
    decoder: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = decoder.engine
    longest = max(map(len, engine.tokenizer.get_vocab()))
    text = "x" * (engine.max_tokens * longest + 1)
    assert tokens_of(decoder, {"prompt": text})

    def tokenise(*_: object, **__: object) -> None:
        raise AssertionError("it was tokenised")

    monkeypatch.setattr(type(engine.tokenizer), "__call__", tokenise)
    for path, body in (
        ("/v1/completions", {"prompt": text}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}),
    ):
        status, answer = decoder.ask(path, body)
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded"), answer


def test_an_answer_has_the_fields_of_vllm(decoder: Served) -> None:
    tokenizer = decoder.engine.tokenizer
    ids = tokenizer(PROMPT)["input_ids"]
    expected = {"count": len(ids), "max_model_len": decoder.engine.max_tokens, "tokens": ids, "token_strs": None}
    assert decoder.ask(TOKENIZE, {"prompt": PROMPT, "model": "tiny"}) == (200, expected)
    expected["token_strs"] = tokenizer.convert_ids_to_tokens(ids)
    assert decoder.ask(TOKENIZE, {"prompt": PROMPT, "return_token_strs": True}) == (200, expected)


def test_special_tokens_are_added_as_asked(decoder: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model here has none that a tokenizer adds, so one is put in front."""
    plain = decoder.engine.tokenizer

    class WithStart:
        def __getattr__(self, name: str) -> Any:
            return getattr(plain, name)

        def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
            return {"input_ids": [7] * add_special_tokens + plain(text, add_special_tokens=False)["input_ids"]}

    bare, chat = (tokens_of(decoder, body) for body in ({"prompt": PROMPT}, {"messages": MESSAGES}))
    monkeypatch.setattr(decoder.engine, "tokenizer", WithStart())
    assert tokens_of(decoder, {"prompt": PROMPT}) == [7, *bare]
    assert tokens_of(decoder, {"prompt": PROMPT, "add_special_tokens": None}) == [7, *bare]
    assert tokens_of(decoder, {"prompt": PROMPT, "add_special_tokens": False}) == bare
    body = {"prompt": [PROMPT], "max_tokens": 1, "return_token_ids": True, "echo": True}
    for special, expected in ((None, [7, *bare]), (True, [7, *bare]), (False, bare)):
        (choice,) = decoder.ask("/v1/completions", body | {"add_special_tokens": special})[1]["choices"]
        assert choice["prompt_token_ids"] == expected
        assert choice["text"].startswith(PROMPT)
    assert tokens_of(decoder, {"messages": MESSAGES}) == chat
    assert tokens_of(decoder, {"messages": MESSAGES, "add_special_tokens": True}) == [7, *chat]


def test_a_chat_ends_as_asked(decoder: Served) -> None:
    tokenizer = decoder.engine.tokenizer

    def rendered(messages: list[dict[str, str]], **options: bool) -> list[int]:
        text = tokenizer.apply_chat_template(messages, tokenize=False, **options)
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    whole = rendered(MESSAGES, add_generation_prompt=True)
    closed = rendered(MESSAGES, add_generation_prompt=False)
    open_ended = rendered(BEGUN, continue_final_message=True)
    assert len({tuple(whole), tuple(closed), tuple(open_ended)}) == 3
    no_prompt = {"add_generation_prompt": False}
    assert tokens_of(decoder, {"messages": MESSAGES}) == whole
    assert tokens_of(decoder, {"messages": MESSAGES} | no_prompt) == closed
    assert tokens_of(decoder, {"messages": BEGUN, "continue_final_message": True} | no_prompt) == open_ended
    for body, tokens in (
        ({"messages": MESSAGES} | no_prompt, closed),
        ({"messages": BEGUN, "continue_final_message": True} | no_prompt, open_ended),
    ):
        chat = {"max_tokens": 1, "return_token_ids": True} | body
        assert decoder.ask("/v1/chat/completions", chat)[1]["prompt_token_ids"] == tokens


TEMPLATE = (
    "{% if not date is defined %}{% set date = '' %}{% endif %}{% set ns = namespace(n=0) %}"
    "{{ bos_token }}{% for message in messages %}{{ message['content'] if loop.first }}{% endfor %}{{ date }}"
    " chat_mode{% if not quiet %} loud{% endif %}{% generation %}{% endgeneration %}"
    "{% if ns.n %}{{ raise_exception(strftime_now('%Y')) }}{% endif %}"
)


@pytest.fixture
def templated(decoder: Served, monkeypatch: pytest.MonkeyPatch) -> Served:
    monkeypatch.setattr(decoder.engine.tokenizer, "chat_template", TEMPLATE)
    return decoder


@pytest.mark.parametrize("values", [None, {}, {"quiet": False}, {"quiet": True}])
def test_a_chat_template_gets_the_values_of_its_names(templated: Served, values: object) -> None:
    body = {"messages": MESSAGES, "chat_template_kwargs": values, "add_special_tokens": False}
    rendered = "<|begin|>" + MESSAGES[0]["content"] + " chat_mode" + ("" if values == {"quiet": True} else " loud")
    tokens = tokens_of(templated, body)
    assert templated.ask(DETOKENIZE, {"tokens": tokens})[1] == {"prompt": rendered}
    chat = {"max_tokens": 1, "return_token_ids": True} | body
    assert templated.ask("/v1/chat/completions", chat)[1]["prompt_token_ids"] == tokens


def test_a_variable_that_a_template_sets_where_it_is_missing_can_be_given(templated: Served) -> None:
    body = {"messages": MESSAGES, "chat_template_kwargs": {"date": " today"}, "add_special_tokens": False}
    answer = templated.ask(DETOKENIZE, {"tokens": tokens_of(templated, body)})[1]
    assert " today chat_mode" in answer["prompt"]


OWN_NAMES = ["message", "loop", "ns", "n", "namespace", "raise_exception", "strftime_now", "generation"]


@pytest.mark.parametrize(
    "name", ["quite", "chat_mode", "content", "messages", "tokenize", "bos_token", "chat_template", *OWN_NAMES]
)
def test_other_names_than_those_of_the_template_are_refused(templated: Served, name: str) -> None:
    status, answer = templated.ask(TOKENIZE, {"messages": MESSAGES, "chat_template_kwargs": {name: "x"}})
    assert (status, answer["error"]["param"]) == (400, "chat_template_kwargs")


def test_a_text_comes_back(decoder: Served) -> None:
    tokens = tokens_of(decoder, {"prompt": PROMPT + " \u00e9\U0001f6a2"})
    assert decoder.ask(DETOKENIZE, {"tokens": tokens}) == (200, {"prompt": PROMPT + " \u00e9\U0001f6a2"})
    chat = tokens_of(decoder, {"messages": MESSAGES})
    rendered = decoder.engine.tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    assert decoder.ask(DETOKENIZE, {"tokens": chat, "model": "tiny"}) == (200, {"prompt": rendered})
    assert decoder.ask(DETOKENIZE, {"tokens": []}) == (200, {"prompt": ""})


REFUSED: list[tuple[str, Any, str]] = [
    (TOKENIZE, {}, "a prompt or messages are needed, and not both; found: neither"),
    (TOKENIZE, {"prompt": "a", "messages": MESSAGES}, "found: prompt and messages"),
    (TOKENIZE, {"prompt": [5, 6]}, "prompt is invalid; found: [5, 6]; expected: `str`"),
    (TOKENIZE, {"prompt": "a", "add_special_tokens": 1}, "add_special_tokens is invalid"),
    (TOKENIZE, {"prompt": "a", "add_generation_prompt": False}, "unknown request field"),
    (TOKENIZE, {"prompt": "a", "return_token_str": True}, "did you mean return_token_strs?"),
    (TOKENIZE, {"messages": []}, "messages is invalid"),
    (TOKENIZE, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "only text content"),
    (TOKENIZE, {"messages": BEGUN, "continue_final_message": True}, "exclude each other"),
    (TOKENIZE, {"messages": MESSAGES, "chat_template": "{{ 1 }}"}, "chat_template is not supported"),
    (TOKENIZE, {"messages": MESSAGES, "chat_template_kwargs": {"a": 1}}, "template does not read it; found: 'a'"),
    (TOKENIZE, {"messages": MESSAGES, "tools": [{"type": "function"}]}, "tools is not supported"),
    (TOKENIZE, b"{", "invalid request body"),
    (DETOKENIZE, {}, "tokens is missing"),
    (DETOKENIZE, {"tokens": "5"}, "tokens is invalid"),
    (DETOKENIZE, {"tokens": [5, -1]}, "tokens has a token id that is not in the model's vocabulary; found: -1"),
    (DETOKENIZE, {"tokens": [5, 10**6]}, "tokens has a token id that is not in the model's vocabulary"),
    (DETOKENIZE, {"tokens": [10**30]}, "tokens has a token id that is not in the model's vocabulary"),
    (DETOKENIZE, {"tokens": [5], "skip_special_tokens": True}, "unknown request field"),
]


@pytest.mark.parametrize(("path", "body", "words"), REFUSED)
def test_what_cannot_be_honoured_is_refused(decoder: Served, path: str, body: Any, words: str) -> None:
    status, answer = decoder.ask(path, body)
    assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
    assert words in answer["error"]["message"]


def test_what_asks_for_what_is_done_anyway_is_no_reason_to_refuse(decoder: Served) -> None:
    harmless = {"tools": [], "chat_template": None, "chat_template_kwargs": {}, "mm_processor_kwargs": {"a": 1}}
    assert tokens_of(decoder, {"messages": MESSAGES} | harmless) == tokens_of(decoder, {"messages": MESSAGES})


@pytest.mark.parametrize(("path", "body"), [(TOKENIZE, {"prompt": "a"}), (DETOKENIZE, {"tokens": [5]})])
def test_another_model_is_a_404_and_another_method_a_405(decoder: Served, path: str, body: dict[str, Any]) -> None:
    status, answer = decoder.ask(path, body | {"model": "other"})
    assert (status, answer["error"]["code"]) == (404, "model_not_found")
    assert decoder.ask(path)[0] == 405


@pytest.mark.parametrize(
    ("path", "body", "method"),
    [
        (TOKENIZE, {"prompt": "x" * (SHORT_TEXT + 1)}, "__call__"),
        (DETOKENIZE, {"tokens": [5] * (SHORT_TEXT + 1)}, "decode"),
    ],
)
def test_others_are_answered_meanwhile(
    decoder: Served, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any], method: str
) -> None:
    begun, may_end = threading.Event(), threading.Event()

    class Slow:
        def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
            return {"input_ids": [5] * len(self.decode([]))}

        def decode(self, token_ids: list[int], skip_special_tokens: bool = False) -> str:
            begun.set()
            assert may_end.wait(DEADLINE_S)
            return "the end"

    monkeypatch.setattr(decoder.engine, "tokenizer", Slow())
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(decoder.ask, path, body)
        assert begun.wait(DEADLINE_S)
        assert decoder.ask("/health")[0] == 200
        may_end.set()
        assert asked.result(DEADLINE_S)[0] == 200
