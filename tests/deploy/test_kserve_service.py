"""The service for KServe that the page shows: Kubernetes takes its pods, and vLLM gets the arguments that are meant."""

from __future__ import annotations

import json
import subprocess

import msgspec
import pytest
import yaml
from chart_support import KUBERNETES, assert_token_is_read, container, needs_tools, run
from docs_pages import blocks

from kvferry.cli.serve.vllm import EXTENSION, MIDDLEWARE
from kvferry.connectors.vllm_keys import ExtraConfig
from kvferry.connectors.vllm_plugin import MODULE, NAME

# How KServe's templates (`config/llmisvcconfig/`, at commit aaac4e294) start vLLM, with another program in its place.
SCRIPT = r"""eval "exec printf '%s\n' serve /mnt/models ${VLLM_ADDITIONAL_ARGS} $@" """
ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}

pytestmark = pytest.mark.parametrize("role", ROLES)


@pytest.fixture
def pod(role):
    (service,) = (block.text for block in blocks("yaml") if "\nkind: LLMInferenceService\n" in block.text)
    spec = yaml.safe_load(service)["spec"]
    return spec["prefill"]["template"] if role == "prefill" else spec["template"]


@needs_tools
@pytest.mark.parametrize("version", KUBERNETES)
def test_it_is_valid(pod, role, version, tmp_path):
    file = tmp_path / "pod.yaml"
    file.write_text(yaml.safe_dump({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": role}, "spec": pod}))
    done = run("kubernetes-validate", "--strict", "--kubernetes-version", version, file)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_image_can_read_the_token(pod, role):
    assert_token_is_read(pod)


def test_vllm_gets_the_connector_and_the_middleware(pod, role):
    given = {each["name"]: each.get("value", "") for each in container(pod)["env"]}
    bash = ["/bin/bash", "-c", SCRIPT, "--"]
    words = subprocess.run(bash, env=given, capture_output=True, text=True, check=True).stdout.splitlines()
    assert words[:2] == ["serve", "/mnt/models"]
    options = dict(zip(words[2::2], words[3::2], strict=True))
    settings = json.loads(options.pop("--kv-transfer-config"))
    assert options == {"--middleware": MIDDLEWARE, "--worker-extension-cls": EXTENSION}
    told = settings["kv_connector"], settings["kv_connector_module_path"], settings["kv_role"]
    assert told == (NAME, MODULE, ROLES[role])
    extra = msgspec.convert(settings["kv_connector_extra_config"], ExtraConfig)
    (mount,) = container(pod)["volumeMounts"]
    assert extra.token_file.startswith(mount["mountPath"])
    assert mount["name"] in {volume["name"] for volume in pod["volumes"]}
