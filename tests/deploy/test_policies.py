"""The chart's objects against checkov's policies for Kubernetes: what is broken, by which values, and why it may be."""

from __future__ import annotations

import json

import pytest
import yaml
from chart_support import VALUES, container, needs_checkov, needs_tools, pods, run

pytestmark = [needs_tools, needs_checkov]

ENGINES = {"prefill", "decode"}
PODS = {*ENGINES, "router"}
# The router's only right is to read the pods of its namespace, which is how it finds engines.
NEEDED = {("CKV_K8S_38", "router")}
# What the values of a set leave out or ask for: why the chart does not insist on a policy, and what may break it.
BY_CHOICE = {
    "CKV_K8S_11": ("a limit of CPUs halts an engine in the middle of a step, and a router its streams", PODS),
    "CKV_K8S_13": ("how much memory an engine needs depends on the model, which the chart does not know", ENGINES),
    "CKV_K8S_15": ("a tag is a version, and is never moved; Always makes a start depend on the registry", PODS),
    "CKV_K8S_43": ("whoever builds the images knows their digests", PODS),
    "CKV_K8S_23": ("only processes of user 0 get IPC_LOCK, for RDMA", ENGINES),
    "CKV_K8S_25": ("IPC_LOCK, for RDMA", ENGINES),
    "CKV_K8S_40": ("only processes of user 0 get IPC_LOCK, for RDMA", ENGINES),
    "CKV_K8S_35": ("a key for downloads, and API keys, which are variables of these programs", PODS),
    "CKV2_K8S_6": ("networkPolicy.enabled=false", PODS),
}
BROKEN_BY = {
    "default": {"CKV_K8S_11", "CKV_K8S_13", "CKV_K8S_15", "CKV_K8S_43"},
    "sglang": {"CKV_K8S_11", "CKV_K8S_13", "CKV_K8S_15", "CKV_K8S_43"},
    "small": {"CKV_K8S_11", "CKV_K8S_13", "CKV_K8S_15", "CKV_K8S_43"},
    "bare": {"CKV_K8S_11", "CKV_K8S_13", "CKV_K8S_15", "CKV_K8S_43", "CKV2_K8S_6"},
    "full": {*BY_CHOICE} - {"CKV2_K8S_6"},
    "strict": set(),
}


def broken(documents, folder):
    """(policy, component) of each policy that an object breaks."""
    file = folder / "all.yaml"
    file.write_text(yaml.safe_dump_all(documents))
    # Without --skip-download it asks its makers for texts about the policies.
    arguments = ("--framework", "kubernetes", "--skip-download", "--quiet", "--compact", "--output", "json")
    done = run("checkov", "--file", file, *arguments)
    assert done.returncode in (0, 1), done.stderr
    report = json.loads(done.stdout)
    assert report["summary"]["parsing_errors"] == 0
    # More than a hundred of them look at a Deployment's pod; fewer would be another checkov.
    assert report["summary"]["passed"] > 100
    return {(each["check_id"], component_of(each["resource"])) for each in report["results"]["failed_checks"]}


def component_of(resource):
    """Of `Kind.namespace.ferry-kvferry-COMPONENT`, behind which a pod of a Deployment has its labels."""
    return resource.split(".")[2].removeprefix("ferry-kvferry").removeprefix("-")


@pytest.mark.parametrize("name", VALUES)
def test_what_is_broken_is_what_the_values_choose(name, rendered, tmp_path):
    found = broken(rendered(name), tmp_path)
    assert found >= NEEDED
    assert {policy for policy, _ in found - NEEDED} == BROKEN_BY[name]
    assert [(policy, where) for policy, where in found - NEEDED if where not in BY_CHOICE[policy][1]] == []


def test_what_breaks_a_policy_is_found(rendered, tmp_path):
    documents = yaml.safe_load(json.dumps(rendered("strict")))
    spoiled = pods(documents)
    container(spoiled["decode"])["securityContext"]["privileged"] = True
    spoiled["prefill"]["hostNetwork"] = True
    del container(spoiled["router"])["readinessProbe"]
    expected = {("CKV_K8S_16", "decode"), ("CKV_K8S_19", "prefill"), ("CKV_K8S_9", "router")}
    assert broken(documents, tmp_path) - NEEDED == expected
