"""The chart's objects against checkov's policies for Kubernetes: what is broken, by which values, and why it may be."""

from __future__ import annotations

import json

import pytest
import yaml
from chart_support import VALUES, needs_checkov, needs_tools, of_kind, run

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
    arguments = ("--file", file, "--framework", "kubernetes", "--skip-download", "--output", "json")
    done = run("checkov", *arguments)
    assert done.returncode in (0, 1), done.stderr
    report = json.loads(done.stdout)
    assert (report["summary"]["parsing_errors"], report["results"]["parsing_errors"]) == (0, [])
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


def privileged(pod):
    pod["containers"][0]["securityContext"]["privileged"] = True


def on_the_hosts_network(pod):
    pod["hostNetwork"] = True


def unprobed(pod):
    del pod["containers"][0]["readinessProbe"]


@pytest.mark.parametrize(
    ("spoil", "policy"),
    [(privileged, "CKV_K8S_16"), (on_the_hosts_network, "CKV_K8S_19"), (unprobed, "CKV_K8S_9")],
)
def test_what_breaks_a_policy_is_found(spoil, policy, rendered, tmp_path):
    documents = yaml.safe_load(json.dumps(rendered("strict")))
    spoil(of_kind(documents, "Deployment")["decode"]["spec"]["template"]["spec"])
    assert broken(documents, tmp_path) - NEEDED == {(policy, "decode")}
