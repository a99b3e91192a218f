"""Requests without an API key, at the processes that commands start: refused, counted, and logged."""

from __future__ import annotations

import urllib.error
import urllib.request

import pytest
from conftest import DEADLINE_S


def asked(url: str, **headers: str) -> tuple[int, str]:
    """Status and id of an answer."""
    request = urllib.request.Request(url, b"{}", {name.replace("_", "-"): value for name, value in headers.items()})
    try:
        with urllib.request.urlopen(request, timeout=DEADLINE_S) as response:
            return response.status, response.headers["x-request-id"]
    except urllib.error.HTTPError as error:
        return error.code, error.headers["x-request-id"]


def metrics(url: str) -> str:
    with urllib.request.urlopen(f"{url}/metrics", timeout=DEADLINE_S) as response:
        return response.read().decode()


def test_a_router_counts_and_logs_who_shows_no_key(start, tmp_path):
    options = ("--port", "0", "--api-key", "secret", "--access-log")
    url = start("router", "route", "--decode", "http://127.0.0.1:9", *options)[1]["url"]
    log = tmp_path / "router.log"
    assert asked(f"{url}/v1/completions", x_request_id="lost-1") == (401, "lost-1")
    assert asked(f"{url}/v1/completions", authorization="Bearer secret", x_request_id="a") == (400, "a")
    assert 'requests_total{endpoint="/v1/completions",path="none",status="401"} 1.0' in metrics(url)
    assert "request lost-1: /v1/completions 401" in log.read_text()
    assert "secret" not in log.read_text()


@pytest.mark.slow
def test_an_engine_counts_who_shows_no_key(start, tiny_model):
    url = start("engine", "serve", "--port", "0", "--model", str(tiny_model), "--api-key", "secret")[1]["url"]
    assert asked(f"{url}/v1/completions", x_request_id="lost-1") == (401, "lost-1")
    assert asked(f"{url}/v1/completions", authorization="Bearer secret", x_request_id="a") == (400, "a")
    assert 'kvferry_engine_requests_total{role="refused",status="401"} 1.0' in metrics(url)
