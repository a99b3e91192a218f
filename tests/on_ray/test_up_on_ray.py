"""`kvferry up --on ray`: the whole job with its proof on a cluster, and what it says where it cannot."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from fleet_on_ray import FleetOnRay
from ray_cluster import eventually, post

TIMEOUT_S = 240
# As somebody else: this process would go on asking a Serve that has ended.
REMOVE = "import ray; from ray import serve; ray.init(); serve.delete('kvferry')"
FILE = Path(__file__).parents[2] / "deploy/ray/kvferry.yaml"


def command_of(address: str, token: object, *words: str) -> tuple[list[str], dict[str, str]]:
    command = [sys.executable, "-m", "kvferry", "up", "--on", "ray", "--transport", "tcp", "--json", *words]
    return command, os.environ | {"RAY_ADDRESS": address, "KVFERRY_TOKEN_FILE": str(token)}


def up(address: str, token: object, *words: str) -> subprocess.CompletedProcess:
    command, variables = command_of(address, token, *words)
    return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, env=variables)


def test_the_answer_on_a_cluster_is_proved(fleet_on_ray: FleetOnRay):
    from ray import serve

    more = ("--model", fleet_on_ray.model, "--port", "8000", "--resources", "CPU=0.5")
    done = up(fleet_on_ray.cluster.address, fleet_on_ray.token, "--once", "The ferry leaves the harbour.", *more)
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert facts["equal"] is True
    assert (facts["tokens_computed"], facts["tokens_received"]) == (1, facts["prompt_tokens"] - 1)
    assert "kvferry" not in serve.status().applications


def test_nothing_is_left_of_one_fleet_that_the_next_would_run_into(fleet_on_ray: FleetOnRay):
    """Neither names a port: each takes one that is free."""
    from ray import serve

    serve.shutdown()
    more = ("--once", "The ferry", "--max-tokens", "2", "--model", fleet_on_ray.model, "--resources", "CPU=0.5")
    for _ in range(2):
        done = up(fleet_on_ray.cluster.address, fleet_on_ray.token, *more)
        assert done.returncode == 0, done.stderr


def test_a_serve_of_somebody_elses_is_asked_for_before_anything_starts_and_stays(fleet_on_ray: FleetOnRay):
    from ray import serve

    serve.shutdown()
    serve.start(http_options={"host": "127.0.0.1", "port": 8765})
    more = ("--model", fleet_on_ray.model, "--resources", "CPU=0.5")
    try:
        done = up(fleet_on_ray.cluster.address, fleet_on_ray.token, "--once", "The ferry", *more)
        assert done.returncode == 2, done.stderr
        assert "Ray Serve runs already, and does not listen here" in done.stderr
        done = up(fleet_on_ray.cluster.address, fleet_on_ray.token, "--once", "The ferry", "--port", "8765", *more)
        assert done.returncode == 0, done.stderr
        assert serve.status().proxies
    finally:
        serve.shutdown()


def test_a_signal_removes_the_fleet(fleet_on_ray: FleetOnRay):
    from ray import serve

    words = ("--port", "8000", "--resources", "CPU=0.5", "--model", fleet_on_ray.model)
    command, variables = command_of(fleet_on_ray.cluster.address, fleet_on_ray.token, *words)
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=variables) as process:
        try:
            lines = []
            for line in process.stderr:
                lines.append(line)
                if "serving an OpenAI API" in line:
                    process.send_signal(signal.SIGTERM)
            assert process.wait(TIMEOUT_S) == 0, "".join(lines)
        finally:
            process.kill()
    assert "kvferry" not in serve.status().applications


def test_a_fleet_that_somebody_removes_is_not_said_to_serve(fleet_on_ray: FleetOnRay):
    words = ("--port", "8000", "--resources", "CPU=0.5", "--model", fleet_on_ray.model)
    command, variables = command_of(fleet_on_ray.cluster.address, fleet_on_ray.token, *words)
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=variables) as process:
        try:
            lines = []
            for line in process.stderr:
                lines.append(line)
                if "serving an OpenAI API" in line:
                    # Serve, which the command has started, may end before that is done.
                    subprocess.run([sys.executable, "-c", REMOVE], env=variables, timeout=TIMEOUT_S, check=False)
            assert process.wait(TIMEOUT_S) == 2, "".join(lines)
        finally:
            process.kill()
    assert "somebody has removed the application kvferry" in "".join(lines)
    assert "Traceback" not in "".join(lines)


def test_errors_come_before_anything_starts(fleet_on_ray: FleetOnRay):
    address = fleet_on_ray.cluster.address
    refused = [
        ("no node of the cluster can hold a prefill engine", up(address, fleet_on_ray.token, "--resources", "GPU=1")),
        ("engines on several nodes need a shared token", up(address, "")),
        ("no Ray cluster can be used here", up("127.0.0.1:1", fleet_on_ray.token)),
    ]
    for words, done in refused:
        assert done.returncode == 2, done.stderr
        assert f"error: {words}" in done.stderr
        assert "Traceback" not in done.stderr


@pytest.mark.parametrize("token", ["/nowhere/token"])
def test_what_an_engine_says_before_it_ends_is_passed_on(fleet_on_ray: FleetOnRay, token):
    done = up(
        fleet_on_ray.cluster.address, token, "--port", "8000", "--resources", "CPU=0.5", "--model", fleet_on_ray.model
    )
    assert done.returncode == 2, done.stderr
    assert "the token file cannot be read" in done.stderr


def test_the_file_for_serve_makes_a_fleet(fleet_on_ray: FleetOnRay, tmp_path):
    from ray import serve

    written = yaml.safe_load(FILE.read_text())
    written["applications"][0]["args"] |= fleet_on_ray.arguments()
    file = tmp_path / "fleet.yaml"
    file.write_text(yaml.safe_dump(written))
    command = [str(Path(sys.executable).with_name("serve")), "run", "--non-blocking", str(file)]
    variables = os.environ | {"RAY_ADDRESS": fleet_on_ray.cluster.address}
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, env=variables)
    assert done.returncode == 0, done.stderr
    application = {}

    def runs() -> bool:
        application["now"] = serve.status().applications["kvferry"]
        return application["now"].status == "RUNNING"

    eventually(runs, lambda: str(application))
    fleet_on_ray.await_engines(1, 1)
    body = {"model": "tiny", "prompt": "The ferry", "max_tokens": 3}
    assert post(f"{fleet_on_ray.url}/v1/completions", body)[0] == 200
    serve.delete("kvferry")
