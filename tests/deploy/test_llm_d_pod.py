"""The pod for llm-d that the page shows: Kubernetes takes it, and kvferry takes its command line."""

from __future__ import annotations

import re

import pytest
import yaml
from chart_support import KUBERNETES, ROOT, assert_token_is_read, container, needs_tools, run
from docs_pages import blocks
from llm_d.scheduler import SCHEDULED_BY

pytestmark = needs_tools


@pytest.fixture
def pod():
    (pod,) = (block.text for block in blocks("yaml") if "\nkind: Pod\n" in block.text)
    return yaml.safe_load(pod)


@pytest.mark.parametrize("version", KUBERNETES)
def test_it_is_valid(pod, version, tmp_path):
    file = tmp_path / "pod.yaml"
    file.write_text(yaml.safe_dump(pod))
    done = run("kubernetes-validate", "--strict", "--kubernetes-version", version, file)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_image_can_read_the_token(pod):
    assert_token_is_read(pod["spec"])


def test_kvferry_serve_takes_its_command_line(pod, served):
    engine = container(pod["spec"])
    chosen, options = served(engine)
    (sidecar,) = pod["spec"]["initContainers"]
    assert (chosen, f"--model-server-port={options.port}" in sidecar["args"]) == ("vllm", True)
    assert {probe["httpGet"]["port"] for key, probe in engine.items() if key.endswith("Probe")} == {options.port}
    assert pod["spec"]["terminationGracePeriodSeconds"] > options.drain_timeout


def test_the_metrics_that_llm_d_reads_are_those_that_are_tested():
    page = (ROOT / "docs/kubernetes.md").read_text()
    assert set(re.findall(r"`(vllm:\w+)`", page)) == set(SCHEDULED_BY)
