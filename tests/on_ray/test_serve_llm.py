"""Ray Serve LLM's own builder of prefill and decode, by configuration only: our connector in real vLLM on two nodes."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_server import VLLM_ON_CPU, is_installed
from ray_cluster import RayCluster, post
from tiny_models import model_folder

from kvferry.embedded.model.greedy_answer import greedy_tokens

pytestmark = pytest.mark.skipif(not is_installed("vllm"), reason="vllm is not installed: see make test-ray-llm")

PROMPT = "The ferry leaves the harbour at dawn, and whoever wants to catch it must not lose a single box on the way."
NUM_TOKENS = 12
# As on a real node before `ray start`: its own address.
OF_NODE = {"VLLM_NIXL_SIDE_CHANNEL_HOST": "{address}"}


@pytest.fixture(scope="module")
def model() -> str:
    return str(model_folder("llama"))


@pytest.fixture(scope="module")
def cluster(model: str) -> Iterator[RayCluster]:
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory(prefix="ray") as folder:
        for name, value in VLLM_ON_CPU.items():
            patch.setenv(name, value)
        with RayCluster(Path(folder)) as cluster:
            cluster.add_node("prefill", variables=OF_NODE)
            cluster.add_node("decode", variables=OF_NODE)
            yield cluster


def side(model: str, resource: str, role: str, token: Path) -> dict[str, object]:
    connector = {
        "kv_connector": "FerryConnector",
        "kv_connector_module_path": "kvferry.connectors.vllm",
        "kv_role": role,
        "kv_connector_extra_config": {"token_file": str(token)},
    }
    engine = {"dtype": "float32", "enforce_eager": True, "max_model_len": 2048, "kv_cache_memory_bytes": 128 << 20}
    return {
        "model_loading_config": {"model_id": "tiny", "model_source": model},
        "placement_group_config": {"bundles": [{"CPU": 1, resource: 1}]},
        "deployment_config": {"autoscaling_config": {"min_replicas": 1, "max_replicas": 1}},
        "engine_kwargs": {**engine, "kv_transfer_config": connector},
    }


def test_the_cache_moves_between_replicas_and_the_answer_is_right(cluster: RayCluster, model: str):
    from ray import serve
    from ray.serve.llm import build_pd_openai_app

    arguments = {
        "prefill_config": side(model, "prefill", "kv_producer", cluster.token),
        "decode_config": side(model, "decode", "kv_consumer", cluster.token),
    }
    serve.run(build_pd_openai_app(arguments), name="pd", route_prefix="/")
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": NUM_TOKENS, "temperature": 0, "return_token_ids": True}
    status, answer = post(f"{cluster.url}/v1/completions", body)
    assert status == 200, answer
    assert tuple(answer["choices"][0]["token_ids"]) == greedy_tokens(model, PROMPT, NUM_TOKENS)
    logs = "".join(path.read_text(errors="replace") for path in cluster.logs.glob("worker-*"))
    assert logs.count("kvferry fetches from ") == 1
    assert all(f"kvferry rank 0 of 1 listens at tcp://{address}:" in logs for address in list(cluster.nodes)[1:])
