"""Real vLLM on two nodes: in our application, and in Ray Serve LLM's own, which is told of our connector."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from engine_server import VLLM_ON_CPU, is_installed
from ray_cluster import RayCluster, eventually, post, processes
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
    assert answer_of(cluster) == greedy_tokens(model, PROMPT, NUM_TOKENS)
    logs = "".join(path.read_text(errors="replace") for path in cluster.logs.glob("worker-*"))
    assert logs.count("kvferry fetches from ") == 1
    assert all(f"kvferry rank 0 of 1 listens at tcp://{address}:" in logs for address in list(cluster.nodes)[1:])
    serve.delete("pd")


def test_servers_of_vllm_in_our_application_leave_nothing_behind(cluster: RayCluster, model: str):
    from ray import serve

    from kvferry.ray import app

    arguments = {
        "model": model,
        "engine": "vllm",
        "token_file": str(cluster.token),
        "drain_timeout_s": 20,
        "router_resources": {"head": 1},
        "extra_args": ["--served-name", "tiny", "--dtype", "float32"],
        "engine_args": ["--enforce-eager", "--max-model-len", "2048", "--kv-cache-memory-bytes", str(128 << 20)],
        "prefill": {"resources": {"prefill": 1}},
        "decode": {"resources": {"decode": 1}},
    }
    serve.run(app(arguments), name="fleet", route_prefix="/")
    cluster.await_engines(1, 1)
    assert answer_of(cluster) == greedy_tokens(model, PROMPT, NUM_TOKENS)
    before, lost = {one["url"] for one in cluster.members()}, servers_of_vllm()
    assert len(lost) > len(before)
    kill_replicas()
    psutil.wait_procs(lost, timeout=60)
    assert [one for one in lost if one.is_running()] == []
    eventually(lambda: not before & {one["url"] for one in cluster.members()}, lambda: "the router has forgotten them")
    cluster.await_engines(1, 1)
    assert answer_of(cluster) == greedy_tokens(model, PROMPT, NUM_TOKENS)
    serve.delete("fleet")
    assert servers_of_vllm() == []


def answer_of(cluster: RayCluster) -> tuple[int, ...]:
    """Of a prefill engine and a decode engine together."""
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": NUM_TOKENS, "temperature": 0, "return_token_ids": True}
    status, answer = post(f"{cluster.url}/v1/completions", body)
    assert status == 200, answer
    return tuple(answer["choices"][0]["token_ids"])


def kill_replicas() -> None:
    """One as Ray does it, the other one as the kernel: nobody asks an engine to end."""
    import ray

    names = [one["name"] for one in ray.util.list_named_actors(all_namespaces=True)]
    prefill = next(name for name in names if "#prefill#" in name)
    ray.kill(ray.get_actor(prefill, namespace="serve"))
    (replica,) = processes("ray::ServeReplica:fleet:decode")
    replica.kill()


def servers_of_vllm() -> list[psutil.Process]:
    """The processes of `vllm serve`, and what they have started."""
    return processes("vllm.entrypoints.cli.main serve", "VLLM::")
