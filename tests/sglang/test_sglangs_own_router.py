"""SGLang's own routers, the former and the present one, in front of two servers whose caches kvferry moves: the whole
model's answers.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from asking import ANSWER_S, NUM_NEW_TOKENS, alone, prompts_of
from engine_server import EngineServer, hold_ports
from sglang_servers import Pair, PairSpec
from tiny_models import model_folder

# The modules of `sglang-router`, and of `smg`, the gateway that took its place.
ROUTERS = ("sglang_router", "smg")
SPECS = [PairSpec("llama")]
one_pair = pytest.mark.parametrize("spec", SPECS, ids=str)


class OwnRouter(EngineServer):
    """One of them for one pair, on loopback alone."""

    def __init__(self, module: str, pair: Pair, log: Path) -> None:
        super().__init__("SGLang router", log, "/readiness")
        self._module, self._pair = module, pair
        self._metrics_port = hold_ports(self.held)

    def environment(self) -> dict[str, str]:
        return {"HF_HUB_OFFLINE": "1"}

    def command(self) -> list[str]:
        prefill, decode = self._pair.servers
        return [
            *(sys.executable, "-m", f"{self._module}.launch_router", "--pd-disaggregation"),
            *("--host", "127.0.0.1", "--port", str(self.port)),
            *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(self._metrics_port)),
            *("--prefill", prefill.url, str(prefill.bootstrap_port), "--decode", decode.url),
            # A request to /health is a prompt, which takes a second.
            *("--policy", "round_robin", "--disable-health-check"),
        ]

    def post(self, path: str, body: dict[str, Any]) -> bytes:
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=ANSWER_S) as response:
            return response.read()

    def tokens(self, prompt: list[int]) -> list[int]:
        sampling = {"temperature": 0, "max_new_tokens": NUM_NEW_TOKENS, "ignore_eos": True}
        return json.loads(self.post("/generate", {"input_ids": prompt, "sampling_params": sampling}))["output_ids"]


@pytest.fixture(params=ROUTERS)
def router(request, pair, tmp_path):
    if importlib.util.find_spec(request.param) is None:
        pytest.skip(f"{request.param} is not installed: see make test-sglang")
    with OwnRouter(request.param, pair, tmp_path / "router.log").running() as router:
        yield router


@one_pair
def test_answers_are_the_whole_models(router, spec):
    for prompt in prompts_of((1, 16, 17, 300, 1500), seed=31):
        assert router.tokens(prompt) == alone(spec.model, prompt)


@one_pair
def test_several_at_once(router, spec):
    prompts = prompts_of([30 + 50 * number for number in range(8)], seed=32)
    with ThreadPoolExecutor(len(prompts)) as pool:
        assert list(pool.map(router.tokens, prompts)) == [alone(spec.model, prompt) for prompt in prompts]


@one_pair
def test_a_completion_reads_the_same_as_a_stream_and_whole(router, spec):
    body = {
        "model": str(model_folder(spec.model)),
        "prompt": "What does the ferry carry across the river at night?",
        "max_tokens": 16,
        "temperature": 0,
        "ignore_eos": True,
    }
    whole = json.loads(router.post("/v1/completions", body))["choices"][0]["text"]
    lines = router.post("/v1/completions", {**body, "stream": True}).splitlines()
    events = [json.loads(line.removeprefix(b"data: ")) for line in lines if line.startswith(b"data: {")]
    assert "".join(choice["text"] for event in events for choice in event["choices"]) == whole != ""
