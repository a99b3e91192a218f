"""Our router in front of two real vLLM servers: what clients of it see, and that the cache moved."""

from __future__ import annotations

import http.client
import json
import random

import anthropic
import openai
import pytest
from answers import EXTERNAL_HITS, FIRST_PLAIN_TOKEN
from crossing import metric, post, route
from servers import PLAIN
from tiny_models import VOCAB_SIZE

NUM_PROMPT_TOKENS = 300
NUM_TOKENS = 12
MESSAGES = [{"role": "user", "content": "What does the ferry carry across the river at night?"}]


@pytest.fixture
def router(pair, tmp_path):
    with route(pair.prefill.url, pair.decode.url, tmp_path / "router.log") as url:
        yield url


def body(salt: str, **fields) -> dict:
    common = {"model": "tiny", "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
    return {**common, "return_token_ids": True, "cache_salt": f"router-{salt}", **fields}


def prompt(seed: str) -> list[int]:
    chooser = random.Random(seed)
    return [chooser.randrange(FIRST_PLAIN_TOKEN, VOCAB_SIZE) for _ in range(NUM_PROMPT_TOKENS)]


def streamed(url: str, path: str, fields: dict) -> tuple[list[dict], str]:
    """The chunks of a streamed answer and the router's word for how it came."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=300)
    try:
        asked = json.dumps({**fields, "stream": True, "stream_options": {"include_usage": True}})
        connection.request("POST", path, asked, {"content-type": "application/json"})
        response = connection.getresponse()
        lines = [line.strip() for line in response]
    finally:
        connection.close()
    assert response.status == 200, lines
    assert lines[-2:] == [b"data: [DONE]", b""]
    chunks = [json.loads(line[len(b"data: ") :]) for line in lines if line.startswith(b"data: {")]
    return chunks, response.headers["x-kvferry-path"]


def ids_of(chunks) -> list[int]:
    return [token for chunk in chunks for choice in chunk["choices"] for token in choice.get("token_ids") or ()]


@pytest.mark.parametrize("spec", [PLAIN], ids=str)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"], ids=["completions", "chat"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_answers_come_from_both_servers_and_equal_those_of_one(pair, spec, router, path, stream):
    name = f"{path.replace(chr(47), chr(32))} {stream}"
    content = {"messages": MESSAGES} if "chat" in path else {"prompt": prompt(name)}
    alone = post(pair.decode.url, body(f"{name} alone", **content), path)
    before = metric(pair.decode.url, EXTERNAL_HITS)
    if stream:
        chunks, way = streamed(router, path, body(name, **content))
        found, usage = ids_of(chunks), chunks[-1]["usage"]
    else:
        answer = post(router, body(name, **content), path)
        found, way, usage = answer["choices"][0]["token_ids"], answer["path"], answer["usage"]
    assert way == "disaggregated"
    assert found == alone["choices"][0]["token_ids"]
    assert len(found) == NUM_TOKENS
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (alone["usage"]["prompt_tokens"], NUM_TOKENS)
    assert metric(pair.decode.url, EXTERNAL_HITS) - before == usage["prompt_tokens"] - 1


TOOL = {
    "type": "function",
    "name": "cross",
    "description": "Crosses the river.",
    "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
    "strict": False,
}
QUESTION = "What does the ferry carry across the river at night? " * 8


def by_anthropic(url: str, salt: str, stream: bool) -> tuple[str, object, str]:
    """What Anthropic's client gets: the text, what it cost, and the router's word for how it came."""
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        asked = client.messages.with_raw_response.create(
            model="tiny",
            max_tokens=NUM_TOKENS,
            system="You know this river.",
            messages=[{"role": "user", "content": QUESTION}],
            stream=stream,
            extra_body={"temperature": 0, "cache_salt": f"messages-{salt}"},
        )
        path, found = asked.headers.get("x-kvferry-path", ""), asked.parse()
        if not stream:
            return found.content[0].text, found.usage, path
        events = list(found)
        texts = [one.delta.text for one in events if one.type == "content_block_delta"]
        assert events[-1].type == "message_stop"
        return "".join(texts), next(one.usage for one in events if one.type == "message_delta"), path


def by_openai(url: str, salt: str, stream: bool) -> tuple[str, object, str]:
    """The same of the Responses API with OpenAI's client."""
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        asked = client.responses.with_raw_response.create(
            model="tiny",
            max_output_tokens=NUM_TOKENS,
            instructions="You know this river.",
            input=[{"role": "user", "content": QUESTION}],
            tools=[TOOL],
            temperature=0,
            stream=stream,
            extra_body={"ignore_eos": True, "cache_salt": f"responses-{salt}"},
        )
        path, found = asked.headers.get("x-kvferry-path", ""), asked.parse()
        if not stream:
            return found.output_text, found.usage, path
        events = list(found)
        texts = [one.delta for one in events if one.type == "response.output_text.delta"]
        assert events[-1].type == "response.completed"
        return "".join(texts), events[-1].response.usage, path


@pytest.mark.parametrize("spec", [PLAIN], ids=str)
@pytest.mark.parametrize("ask", [by_anthropic, by_openai])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_messages_and_responses_come_from_both_servers_and_equal_those_of_one(pair, spec, router, ask, stream):
    moved = pair.decode.metric(EXTERNAL_HITS)
    text, usage, path = ask(router, f"split-{stream}", stream)
    assert path == "disaggregated"
    assert pair.decode.metric(EXTERNAL_HITS) > moved
    alone, usage_alone, _ = ask(pair.decode.url, f"alone-{stream}", stream)
    assert text == alone != ""
    assert usage.output_tokens == usage_alone.output_tokens
    assert usage.input_tokens == usage_alone.input_tokens


@pytest.mark.parametrize("spec", [PLAIN], ids=str)
def test_tokens_of_a_message_are_counted(pair, spec, router):
    with anthropic.Anthropic(base_url=router, api_key="none", max_retries=0) as client:
        asked = {"model": "tiny", "messages": [{"role": "user", "content": QUESTION}]}
        counted = client.messages.count_tokens(**asked).input_tokens
        assert counted == client.messages.create(**asked, max_tokens=1).usage.input_tokens
