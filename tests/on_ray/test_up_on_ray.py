"""`kvferry up --on ray`: the whole job with its proof on a cluster, and what it says where it cannot."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from fleet_on_ray import FleetOnRay

TIMEOUT_S = 240


def up(address: str, token: object, *words: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "kvferry", "up", "--on", "ray", "--transport", "tcp", "--json", *words]
    variables = os.environ | {"RAY_ADDRESS": address, "KVFERRY_TOKEN_FILE": str(token)}
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


def test_errors_come_before_anything_starts(fleet_on_ray: FleetOnRay):
    address = fleet_on_ray.cluster.address
    refused = {
        "no node of the cluster can hold a prefill engine": up(address, fleet_on_ray.token, "--resources", "GPU=1"),
        "engines on several nodes need a shared token": up(address, ""),
        "no Ray cluster can be used here": up("127.0.0.1:1", fleet_on_ray.token),
    }
    for words, done in refused.items():
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
