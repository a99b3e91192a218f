"""Engines that find their router by themselves: they register, serve, drain and are gone."""

from __future__ import annotations

import json
import time
import urllib.request

import pytest
from conftest import DEADLINE_S, eventually, post
from test_main_job import prompt_of

from kvferry.cli.up.processes import Child

READY_S = 240.0


@pytest.fixture
def start(tmp_path):
    children = []

    def begin(name: str, *arguments: str) -> tuple[Child, str]:
        child = Child(name, arguments, tmp_path / f"{name}.log")
        children.append(child)
        return child, str(child.wait_until_ready(time.monotonic() + READY_S)["url"])

    yield begin
    for child in children:
        child.terminate()
    for child in children:
        child.stop()


def members(url: str) -> dict:
    with urllib.request.urlopen(f"{url}/kvferry/members", timeout=DEADLINE_S) as response:
        return json.load(response)


def ready(url: str) -> list[str]:
    return sorted(member["role"] for member in members(url)["members"] if member["ready"])


def test_engines_join_serve_and_leave(start, tiny_model, tmp_path):
    token = tmp_path / "token"
    token.write_text("0123456789abcdef0123456789abcdef")
    token.chmod(0o600)
    router, url = start("router", "route", "--port", "0", "--accept-registrations", "--token-file", str(token))
    model = ("--model", str(tiny_model), "--served-name", "tiny", "--token-file", str(token), "--drain-timeout", "1")
    join = ("serve", "--port", "0", "--transport", "shm", "--register", url)
    prefill, _ = start("p", *join, "--role", "prefill", "--engine-id", "p", *model)
    decode, _ = start("d", *join, "--role", "decode", "--engine-id", "d", "--block-tokens", "32", *model)
    eventually(lambda: ready(url) == ["decode", "prefill"], "both have registered and are ready")
    caches = {(member["cache"], member["wire_version"], *member["models"]) for member in members(url)["members"]}
    assert len(caches) == 1
    body = {"model": "tiny", "prompt": prompt_of(60), "max_tokens": 5}
    assert post(f"{url}/v1/completions", body)["kvferry"]["tokens_received"] == 59
    prefill.terminate()
    eventually(lambda: ready(url) == ["decode"], "the prefill engine has left")
    assert post(f"{url}/v1/completions", body)["kvferry"]["tokens_received"] == 0
    eventually(lambda: len(members(url)["members"]) == 1, "it is forgotten")
    assert (router.running, decode.running) == (True, True)
