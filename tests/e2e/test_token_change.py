"""A fleet goes from one shared token to another, engine by engine, while clients go on: nobody notices."""

from __future__ import annotations

import contextlib
import secrets

import pytest
from chaos_support import GATED, Process, running
from conftest import eventually, members, post
from fleet_clients import PROMPTS, Clients, asked, replace, tokens_of

pytestmark = pytest.mark.slow

OLD, NEW = secrets.token_hex(32), secrets.token_hex(32)
# What is in the file in each step, as docs/security.md has it.
STEPS = {"before": (OLD,), "accepted": (OLD, NEW), "used": (NEW, OLD), "after": (NEW,)}


def ready(url: str) -> set[str]:
    return {f"{member['url']} {member['role']}" for member in members(url) if member["ready"]}


def test_no_request_is_computed_again_while_the_token_changes(tiny_model, tmp_path):
    files = {name: tmp_path / f"{name}.token" for name in STEPS}
    for name, path in files.items():
        path.touch(mode=0o600)
        path.write_text("\n".join(STEPS[name]) + "\n")
    # It has been replaced before the first engine, and is once more after the last one.
    router = Process(tmp_path / "router.log", "route", "--accept-registrations", "--token-file", str(files["accepted"]))
    with running(router):
        where = ("--model", str(tiny_model), "--served-name", "tiny", "--transport", "shm", "--register", router.url)

        def engine(role: str, step: str) -> Process:
            name, token = f"{role}-{step}", str(files[step])
            words = ("serve", "--engine-id", name, "--role", role, "--token-file", token, *where)
            return Process(tmp_path / f"{name}.log", *words, script=GATED)

        with contextlib.ExitStack() as stack:
            serving: dict[str, Process] = {}

            def take(role: str, step: str) -> None:
                """Start an engine, wait until the router knows it, then end the one whose place it takes."""
                new = engine(role, step)
                stack.enter_context(running(new))
                eventually(lambda: f"{new.url} {role}" in ready(router.url), f"the router knows {role}-{step}")
                if role in serving:
                    replace(serving[role])
                serving[role] = new

            for role in ("prefill", "decode"):
                take(role, "before")
            url = f"{serving['decode'].url}/v1/completions"
            clients = Clients(router.url, [tokens_of(post(url, asked(each))) for each in PROMPTS])
            stack.callback(clients.stop)
            for step in ("accepted", "used", "after"):
                for role in ("prefill", "decode"):
                    take(role, step)
                    clients.until_more()
            clients.stop()
        assert clients.wrong == []
        assert set(clients.ways) == {("disaggregated", "received")}, clients.ways
