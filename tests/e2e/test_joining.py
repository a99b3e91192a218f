"""Engines that find their router by themselves: they register, serve, drain and are gone."""

from __future__ import annotations

from conftest import eventually, members, post
from test_main_job import prompt_of


def ready(url: str) -> list[str]:
    return sorted(member["role"] for member in members(url) if member["ready"])


def test_engines_join_serve_and_leave(start, tiny_model, tmp_path):
    token = tmp_path / "token"
    token.write_text("0123456789abcdef0123456789abcdef")
    token.chmod(0o600)
    router, told = start("router", "route", "--port", "0", "--accept-registrations", "--token-file", str(token))
    url = told["url"]
    model = ("--model", str(tiny_model), "--served-name", "tiny", "--token-file", str(token), "--drain-timeout", "1")
    join = ("serve", "--port", "0", "--transport", "shm", "--register", url)
    prefill, _ = start("p", *join, "--role", "prefill", "--engine-id", "p", *model)
    decode, _ = start("d", *join, "--role", "decode", "--engine-id", "d", "--block-tokens", "32", *model)
    eventually(lambda: ready(url) == ["decode", "prefill"], "both have registered and are ready")
    caches = {(member["cache"], member["wire_version"], *member["models"]) for member in members(url)}
    assert len(caches) == 1
    body = {"model": "tiny", "prompt": prompt_of(60), "max_tokens": 5}
    assert post(f"{url}/v1/completions", body)["kvferry"]["tokens_received"] == 59
    prefill.terminate()
    eventually(lambda: ready(url) == ["decode"], "the prefill engine has left")
    assert post(f"{url}/v1/completions", body)["kvferry"]["tokens_received"] == 0
    eventually(lambda: len(members(url)) == 1, "it is forgotten")
    assert (router.running, decode.running) == (True, True)
