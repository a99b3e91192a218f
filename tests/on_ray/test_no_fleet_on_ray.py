"""What `kvferry up --on ray` says where no cluster, or no router of ours, is to be found. No cluster is needed."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from kvferry.errors import ConfigurationError


@contextmanager
def answering(*bodies: bytes) -> Iterator[str]:
    """The URL of a server that gives each answer once, and the last one from then on."""
    left = list(bodies)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(left.pop(0) if len(left) > 1 else left[0])

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize("address", ["a..b:1", f"{'x' * 70}:1"])
def test_an_address_that_is_none_is_one_clear_message(address: str):
    from kvferry.cli.ray.fleet import _connect

    with pytest.raises(ConfigurationError, match="no Ray cluster can be used here") as caught:
        _connect(address)
    assert caught.value.found.startswith(f"{address}: ")


@pytest.mark.parametrize("body", [b'{"status": "ok"}', b"[]", b'{"members": [{"url": "a"}]}', b"<html>"])
def test_another_service_is_not_the_router(body: bytes):
    from kvferry.cli.ray.fleet import _ready

    with answering(body) as url, pytest.raises(ConfigurationError, match=f"there is no router at {url}"):
        _ready(url)


def members(*, are_ready: bool = True, models: tuple[str, ...] = ("m",)) -> bytes:
    roles = ("prefill", "decode")
    told = [{"url": f"http://{role}", "role": role, "ready": are_ready, "models": models} for role in roles]
    return json.dumps({"members": told}).encode()


def test_engines_are_told_as_they_were_when_all_were_ready(monkeypatch: pytest.MonkeyPatch):
    from types import SimpleNamespace

    from kvferry.cli.ray import fleet
    from kvferry.cli.ray.settings import settings_from

    monkeypatch.setattr(fleet, "_state", lambda: SimpleNamespace(status="RUNNING"))
    monkeypatch.setattr(fleet, "POLL_S", 0.0)
    answers = members(are_ready=False), members(models=()), members(), members(are_ready=False)
    with answering(*answers) as url:
        on_ray = fleet.RayFleet(settings_from({}), int(url.rpartition(":")[2]), 0.0)
        on_ray._await(float("inf"))
    assert (on_ray.url, on_ray.model) == (url, "m")
    assert (on_ray.prefill_urls, on_ray.decode_urls) == (("http://prefill",), ("http://decode",))
