"""The Helm chart as tests see it: sets of values, the tools, and what is in the documents that Helm renders."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy/kubernetes/kvferry"
DOCKERFILE = ROOT / "deploy/container/Dockerfile"
# `make test-chart` installs them beside Python, and checkov, which pins what it needs, in an environment of its own.
PATH = os.pathsep.join((str(Path(sys.executable).parent), str(ROOT / ".venv-checkov/bin"), os.environ.get("PATH", "")))
TOOLS = {name: shutil.which(name, path=PATH) for name in ("helm", "kubernetes-validate", "hadolint", "checkov")}
MISSING = [name for name, path in TOOLS.items() if path is None and name != "checkov"]
# The oldest and the newest one: of the chart, and of the schemas.
KUBERNETES = ("1.30", "1.37")
# What the Prometheus operator brings has no schema there.
CUSTOM = {"PodMonitor"}
TOKEN = "0123456789abcdef" * 4
MODEL = {"model": "Qwen/Qwen3-8B"}
SMALL = {"model": "tiny", "engine": "transformers"}
SCALED = {"enabled": True, "minReplicas": 1, "maxReplicas": 3}
FULL = {
    **MODEL,
    "model": "/models/llama",
    "servedName": "llama",
    "transport": "nixl",
    "listenHost": "::",
    "image": {"registry": "registry.example.com/team/", "pullSecrets": [{"name": "registry"}]},
    "models": {"existingClaim": "models", "subPath": "here"},
    "token": {"value": TOKEN},
    "engines": {"rdma": {"resource": "rdma/ib", "count": 2}, "cache": {"sizeLimit": "20Gi"}, "runAsUser": 0},
    "prefill": {
        "resources": {"limits": {"nvidia.com/gpu": 4, "memory": "64Gi"}},
        "extraArgs": ["--digest", "full", "--failure-policy", "fail"],
        "engineArgs": ["--tensor-parallel-size", "4"],
        "env": [{"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}}],
        "autoscaling": {**SCALED, "behavior": {"scaleDown": {"stabilizationWindowSeconds": 600}}},
        "nodeSelector": {"gpu": "h200"},
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
        "topologySpreadConstraints": [
            {"maxSkew": 1, "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "ScheduleAnyway"}
        ],
        "priorityClassName": "high",
        "podLabels": {"team": "a"},
        "podAnnotations": {"note": "x"},
    },
    "decode": {"autoscaling": SCALED, "terminationGracePeriodSeconds": 900},
    "router": {
        "autoscaling": SCALED,
        "extraArgs": ["--ttft-slo", "5", "--max-requests", "64"],
        "env": [{"name": "KVFERRY_API_KEY", "valueFrom": {"secretKeyRef": {"name": "keys", "key": "api"}}}],
        "service": {"type": "LoadBalancer", "port": 443, "annotations": {"internal": "true"}},
        "serviceAccountAnnotations": {"a": "b"},
    },
    "networkPolicy": {"metricsNamespaceLabels": {"kubernetes.io/metadata.name": "monitoring"}},
    "podMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
    "grafanaDashboard": {"enabled": True, "annotations": {"folder": "LLM"}},
}
BARE = {
    **SMALL,
    "preStopSeconds": 0,
    "token": {"existingSecret": "mine", "key": "shared"},
    "networkPolicy": {"enabled": False},
    "prefill": {"replicas": 0, "podDisruptionBudget": {"enabled": False}},
    "decode": {"replicas": 3, "strategy": {"type": "Recreate", "rollingUpdate": None}},
    "router": {"replicas": 1, "podDisruptionBudget": {"maxUnavailable": "50%"}},
}
LIMITED = {"resources": {"limits": {"cpu": 8, "memory": "64Gi"}}}
DIGESTED = {"digest": f"sha256:{'5a' * 32}"}
STRICT = {
    **MODEL,
    "image": {"registry": "registry.example.com", "pullPolicy": "Always"},
    "engines": {"image": DIGESTED},
    "prefill": LIMITED,
    "decode": LIMITED,
    "router": {**LIMITED, "image": DIGESTED},
}
SGLANG = {**MODEL, "engine": "sglang", "prefill": {"engineArgs": ["--tp", "2"]}}
VALUES = {"default": MODEL, "sglang": SGLANG, "small": SMALL, "full": FULL, "bare": BARE, "strict": STRICT}

# Their seconds become minutes where other work has the cores.
TOOL_S = 240
needs_tools = pytest.mark.skipif(bool(MISSING), reason=f"the extra chart is not installed: {', '.join(MISSING)}")
needs_checkov = pytest.mark.skipif(TOOLS["checkov"] is None, reason="checkov is not installed: see make test-chart")


def run(tool, *arguments, text=None, **more):
    words = [TOOLS[tool], *map(str, arguments)]
    return subprocess.run(words, input=text, capture_output=True, text=True, check=False, timeout=TOOL_S, **more)


def helm(command, values, *arguments):
    return run("helm", command, *arguments, CHART, "--values", "-", text=json.dumps(values))


def of_kind(documents, kind):
    return {each["metadata"]["name"].removeprefix("ferry-kvferry-"): each for each in documents if each["kind"] == kind}


def pods(documents):
    """The pod of each Deployment by the name of its component."""
    return {name: each["spec"]["template"]["spec"] for name, each in of_kind(documents, "Deployment").items()}


def container(pod):
    (only,) = pod["containers"]
    return only


def after(words, option):
    return words[words.index(option) + 1]


def labels_select(selector, labels):
    wanted = selector.get("matchLabels", {}).items() <= labels.items()
    return wanted and all(each["key"] in labels for each in selector.get("matchExpressions", ()))


def version():
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


def assert_token_is_read(pod):
    """The file belongs to root and to the group of the pod: the image's own group has to be that."""
    (user,) = re.findall(r"^USER \d+:(\d+)$", (ROOT / "deploy/container/Dockerfile").read_text(), re.MULTILINE)[-1:]
    (token,) = (each["secret"] for each in pod["volumes"] if each["name"] == "token")
    assert (token["defaultMode"], pod["securityContext"]["fsGroup"]) == (0o440, int(user))
