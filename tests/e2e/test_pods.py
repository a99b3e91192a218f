"""Engines that a router finds by the labels of their pods: real engines, the official client, and an API for pods."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from urllib.parse import urlsplit

import pytest
from cluster_api import ClusterApi, pod, serving_api
from conftest import eventually, members, post
from test_main_job import prompt_of

SELECT = ("--kubernetes-selector", "app=kvferry", "--kubernetes-namespace", "inference")


@pytest.fixture
def api():
    """On a loop of its own; `call` does something there."""
    made: list[ClusterApi] = []
    is_there, is_over = threading.Event(), asyncio.Event()
    loop = asyncio.new_event_loop()

    async def serve() -> None:
        async with serving_api() as served:
            made.append(served)
            is_there.set()
            await is_over.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=[serve()])
    thread.start()
    assert is_there.wait(30)
    served = made[0]
    served.call = loop.call_soon_threadsafe
    yield served
    loop.call_soon_threadsafe(is_over.set)
    thread.join(30)
    loop.close()


def engine_pod(name: str, url: str, **metadata: str) -> dict:
    parts = urlsplit(url)
    return pod(name, name, parts.hostname, parts.port, **metadata)


@pytest.mark.slow
def test_engines_come_and_go_with_their_pods(start, tiny_model, tmp_path, api, monkeypatch):
    monkeypatch.setenv("KUBECONFIG", api.kubeconfig(tmp_path / "kubeconfig"))
    _, router = start("router", "route", "--port", "0", *SELECT)
    url = router["url"]
    model = ("--model", str(tiny_model), "--served-name", "tiny")
    engines = {
        name: start(name, "serve", "--port", "0", "--engine-id", name, *model)[1] for name in ("prefill", "decode")
    }
    for name, engine in engines.items():
        api.call(api.put, engine_pod(name, engine["url"]))
    eventually(lambda: sum(one["ready"] for one in members(url)) == 2, "both pods are ready instances")
    assert {(one["role"], one["origin"]) for one in members(url)} == {
        ("prefill", "Kubernetes"),
        ("decode", "Kubernetes"),
    }
    body = {"model": "tiny", "prompt": prompt_of(60), "max_tokens": 5}
    assert post(f"{url}/v1/completions", body)["kvferry"]["tokens_received"] == 59
    api.call(api.put, engine_pod("prefill", engines["prefill"]["url"], deletionTimestamp="2026-11-27T12:00:00Z"))
    eventually(lambda: [one["role"] for one in members(url)] == ["decode"], "a terminating pod is no instance")
    assert post(f"{url}/v1/completions", body)["kvferry"]["tokens_received"] == 0


def test_a_router_that_may_not_list_pods_does_not_start(tmp_path, api, monkeypatch):
    monkeypatch.setenv("KUBECONFIG", api.kubeconfig(tmp_path / "kubeconfig"))
    api.refusal = 403, 'pods is forbidden: User "system:serviceaccount:inference:default" cannot list resource "pods"'
    command = [sys.executable, "-m", "kvferry", "route", "--port", "0", *SELECT]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (found.returncode, found.stdout) == (2, "")
    assert "error: the Kubernetes API refuses to list pods" in found.stderr
    assert '403 pods is forbidden: User "system:serviceaccount:inference:default"' in found.stderr
    assert "Traceback" not in found.stderr
