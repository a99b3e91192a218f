"""What becomes of every field of a chat message and of a part of its content: one case per row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from embedded_server import Served

from kvferry.embedded.request.bodies import ChatMessage, ContentPart
from kvferry.embedded.request.chat import WatchedMessage, plain_messages
from kvferry.embedded.request.support import SUPPORT, Support, Verdict
from kvferry.errors import RequestError

CHAT = "/v1/chat/completions"
CALL = {"id": "call-1", "type": "function", "function": {"name": "tide", "arguments": '{"hour": 6}'}}
VALUES: dict[str, Any] = {"role": "system", "content": "b", "tool_calls": [CALL]}
SOMETHING = {"anything": [1]}
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}"
    "{% if m.role == 'tool' %}({{ m.tool_call_id }}){% endif %}"
    "{% for call in m.tool_calls %}{{ call.function.name }}={{ call.function.arguments.hour }}{% endfor %}{% endfor %}"
)


def plain(**fields: Any) -> dict[str, Any]:
    return plain_messages([{"role": "user", "content": "a"} | fields])[0]


def part(**fields: Any) -> dict[str, Any]:
    return plain(content=[{"type": "text", "text": "a"} | fields])


@pytest.mark.parametrize("row", SUPPORT[ChatMessage].values(), ids=lambda row: row.name)
def test_every_field_of_a_message_is_what_happens(row: Support) -> None:
    match row.verdict:
        case Verdict.HONOURED:
            assert plain(**{row.name: VALUES.get(row.name, "x")}) != plain()
            if row.reason:
                assert plain(**{row.name: None}) == plain()
        case _:
            with pytest.raises(RequestError, match=rf"^messages\[0\].{row.name} is not supported") as refused:
                plain(**{row.name: SOMETHING})
            assert refused.value.hint == f"leave {row.name} out"
            for harmless in (None, *row.harmless):
                assert plain(**{row.name: harmless}) == plain()


@pytest.mark.parametrize("row", SUPPORT[ContentPart].values(), ids=lambda row: row.name)
def test_every_field_of_a_part_is_what_happens(row: Support) -> None:
    match row.verdict:
        case Verdict.HONOURED:
            if row.name == "text":
                assert part(text="b") != part()
            else:
                with pytest.raises(RequestError, match="only text content"):
                    part(type="image_url")
        case Verdict.NO_EFFECT:
            assert part(**{row.name: SOMETHING}) == part()
        case Verdict.REFUSED:
            with pytest.raises(RequestError, match=rf"^messages\[0\].content\[0\].{row.name} is not supported"):
                part(**{row.name: SOMETHING})
            for harmless in (None, *row.harmless):
                assert part(**{row.name: harmless}) == part()


PARTS = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
TEMPLATES = {
    "{% for m in messages %}{{ m['content'] }}{% endfor %}": "a\nb",
    "{% for m in messages %}{% for line in m['content'].split('x') %}{{ line }}{% endfor %}{% endfor %}": "a\nb",
    "{% for m in messages %}{% for p in m['content'] %}[{{ p['text'] }}]{% endfor %}{% endfor %}": "[a][b]",
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{%- for p in m.content -%}"
    "{{ p.text }}{% endfor %}{% endif %}{% endfor %}": "ab",
    "{% for m in messages %}{% for p in m['content'] | selectattr('type', 'equalto', 'text') %}{{ p['text'] }};"
    "{% endfor %}{% endfor %}": "a;b;",
    "{% for m in messages if m.content %}{{ m.content }}{% endfor %}": "a\nb",
    "{% for m in messages %}{% set content = m['content'] %}"
    "{% for p in content %}{{ p.text }}|{% endfor %}{% endfor %}": "a|b|",
}


@pytest.mark.parametrize(("template", "expected"), TEMPLATES.items(), ids=range(len(TEMPLATES)))
def test_parts_are_lines_for_a_template_that_takes_text(
    decoder: Served, monkeypatch: pytest.MonkeyPatch, template: str, expected: str
) -> None:
    """As in vLLM, by which engine a chat is tokenised makes no difference. A single string is what it is."""
    tokenizer = decoder.engine.tokenizer
    monkeypatch.setattr(tokenizer, "chat_template", template)
    _, told = decoder.ask("/tokenize", {"messages": [{"role": "user", "content": PARTS}]})
    assert told["tokens"] == tokenizer(expected, add_special_tokens=False)["input_ids"]


def test_unknown_fields_are_refused() -> None:
    for make in (plain, part):
        with pytest.raises(RequestError, match="unknown request field"):
            make(colour="red")
        assert make(colour=None) == make()


def test_an_answer_may_be_sent_back_as_it_was() -> None:
    nulls = dict.fromkeys(("refusal", "annotations", "audio", "function_call", "tool_calls", "reasoning_content"))
    expected = {"role": "assistant", "content": "b"}
    assert plain_messages([expected | nulls, expected | {"annotations": [], "tool_calls": []}]) == [expected] * 2


def test_arguments_become_an_object() -> None:
    message = plain(role="assistant", content=None, tool_calls=[CALL])
    assert message["tool_calls"][0]["function"]["arguments"] == {"hour": 6}
    broken = {"function": {"name": "tide", "arguments": "{"}}
    with pytest.raises(RequestError, match="arguments that cannot be read"):
        plain(role="assistant", tool_calls=[broken])


LOOKS: list[Any] = [list, lambda m: m.items(), lambda m: m.values(), lambda m: m["name"], lambda m: m.get("name")]


@pytest.mark.parametrize("look", [*LOOKS, lambda m: "name" in m])
def test_every_way_to_look_at_a_field_is_noted(look: Any) -> None:
    message = WatchedMessage({"role": "user", "name": "Ada"})
    look(message)
    assert "name" in message.read


@pytest.mark.parametrize("name", ["name", "tool_calls", "tool_call_id", "reasoning_content", "reasoning"])
def test_what_the_template_does_not_read_is_refused(decoder: Served, name: str) -> None:
    message = {"role": "user", "content": "a", name: VALUES.get(name, "x")}
    status, answer = decoder.ask(CHAT, {"messages": [message], "max_tokens": 1})
    assert status == 400
    assert f"messages[0].{name} is not supported" in answer["error"]["message"]


def test_what_the_template_reads_is_honoured(decoder: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder.engine.tokenizer, "chat_template", TEMPLATE)
    called = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    messages = [called, {"role": "tool", "content": "low", "tool_call_id": "call-1"}]
    status, answer = decoder.ask("/tokenize", {"messages": messages})
    assert (status, decoder.engine.tokenizer.decode(answer["tokens"])) == (200, "assistant:tide=6tool:low(call-1)")
    status, _ = decoder.ask("/tokenize", {"messages": [{"role": "user", "content": "a", "tool_call_id": "x"}]})
    assert status == 400


def test_the_documentation_names_every_field_of_messages() -> None:
    page = (Path(__file__).parents[2] / "docs" / "embedded.md").read_text()
    section = page.split("## Fields of messages\n")[1].split("\n## ")[0]
    assert [name for body in (ChatMessage, ContentPart) for name in SUPPORT[body] if f"`{name}`" not in section] == []
