"""Every benchmark runs, and prints JSON that says on what machine: nobody wants to find out when a machine is there."""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from hosts import WHY_NOT

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
# As little as each of them can do.
SMALLEST = [
    "accuracy.py --prompts 2 --only pull",
    "accuracy_defects.py --prompts 2",
    "connections.py --repeats 1",
    "device_pair.py --repeats 1 --device cpu --pairs 2-1 --formats token-major --tokens 256",
    "digest.py --repeats 1",
    "early_decode.py --tokens 64 --ways push --repeats 1 --step token=0.1ms,step=2ms",
    "fetch_steps.py --repeats 1 --transports shm",
    "goodput.py --rates 4 --requests 2 --step token=1ms,step=2ms,sequence=0.1ms,overlap=0 --chunks 200",
    "goodput_search.py --tokens-ms 2.4 --steps-ms 48 --overlaps 0 --chunks 300",
    "layer_wise.py --repeats 1 --step-ms 5",
    "mixed_tp.py --repeats 1 --pairs 3-2 --formats head-major --tokens 256",
    "mixed_tp.py --repeats 1 --pairs 2-4 --formats token-major --tokens 256 --transport shm",
    "mixed_tp.py --repeats 1 --pairs 4-2 --formats token-major --tokens 256 --transport cma",
    "peers.py --peers 2 --roles target,meeting --idle-s 0.1",
    "planner.py --repeats 1",
    "router.py --only kvferry --seconds 1 --settle-s 0.1",
    "router.py --only kvferry --seconds 1 --settle-s 0.1 --connections kept --parts latency",
    "router_choice.py --instances 4,70",
    "router_storm.py --instances 4 --rounds 1 --restarts 1 --seconds 0.2 --notice-s 0.1",
    "simulate_fleet.py --only 40 --extra '--duration 6 --warm-up 1 --rate 20'",
    "staging.py --mebibytes 1 --repeats 1 --row-bytes 256",
    "staging_index.py --repeats 1",
    "transports.py --mebibytes 1 --repeats 1",
    "ucx_settings.py --rounds 1 --mebibytes 1",
]
BETWEEN_HOSTS = [
    "mixed_tp.py --hosts --transport tcp --repeats 1 --pairs 2-2 --formats head-major --tokens 256",
    "transports.py --hosts --transports tcp --mebibytes 1 --repeats 1",
]
# Those of real vLLM and SGLang servers run in an environment of their own, draw_mixed_tp.py draws what is there, and
# staging_device.py is tested with the kernels (tests/staging), where Triton is.
ELSEWHERE = {"sglang_nixl.py", "vllm_early.py", "vllm_pd.py", "draw_mixed_tp.py", "staging_device.py"}
DEADLINE_S = 240.0


@pytest.mark.slow
@pytest.mark.parametrize("words", SMALLEST, ids=[words.partition(" --repeats")[0] for words in SMALLEST])
def test_it_runs_and_prints_json(words):
    expect_json(words)


@pytest.mark.slow
@pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
@pytest.mark.parametrize("words", BETWEEN_HOSTS, ids=["fetches", "rows"])
def test_it_runs_between_hosts(words):
    expect_json(words)


def expect_json(words):
    name, *arguments = shlex.split(words)
    command = [sys.executable, str(BENCHMARKS / name), *arguments]
    found = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
    assert found.returncode == 0, found.stderr
    assert json.loads(found.stdout)["machine"]


def test_none_is_forgotten():
    programs = {path.name for path in BENCHMARKS.glob("*.py") if 'if __name__ == "__main__"' in path.read_text()}
    # Processes that these start.
    helpers = {"mixed_tp_source.py", "plain_sockets.py", "router_engine.py", "storm_engines.py"}
    assert programs - helpers == {words.split()[0] for words in SMALLEST} | ELSEWHERE
