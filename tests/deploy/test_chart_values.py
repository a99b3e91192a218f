"""The chart's values, its notes and its page; what cannot work is refused. Nothing of it needs a cluster."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import zip_longest
from threading import Thread

import pytest
import yaml
from chart_support import CHART, FULL, MODEL, ROOT, SCALED, SGLANG, SMALL, TOKEN, helm, needs_tools, run
from docs_pages import calls_of

from kvferry.agent.control.shared_token import MAX_TOKEN_BYTES, MIN_DIFFERENT_BYTES, MIN_TOKEN_BYTES
from kvferry.cli.serve import sglang, vllm

pytestmark = needs_tools


def test_the_schema_has_the_values_and_no_others():
    schema = json.loads((CHART / "values.schema.json").read_text())

    def compare(values, part, place):
        part = schema["definitions"][part["$ref"].rpartition("/")[2]] if "$ref" in part else part
        # A pod's own words; Kubernetes knows them.
        if "properties" not in part or place[-1:] == ["resources"]:
            return
        assert part["additionalProperties"] is False, place
        assert set(part["properties"]) - {"global"} == set(values), place
        for key, value in values.items():
            compare(value, part["properties"][key], [*place, key])

    compare(yaml.safe_load((CHART / "values.yaml").read_text()), schema, [])


def notes_of(values, folder):
    """Helm shows notes only when it installs, so this copy of the chart has them in an object."""
    chart = shutil.copytree(CHART, folder / "chart")
    notes = (chart / "templates/NOTES.txt").read_text()
    shown = 'kind: Notes\nnotes: {{ include "notes" . | quote }}\n'
    (chart / "templates/notes.yaml").write_text(f'{{{{- define "notes" -}}}}\n{notes}\n{{{{- end -}}}}\n{shown}')
    arguments = ("--namespace", "inference", "--show-only", "templates/notes.yaml", "--values", "-")
    done = run("helm", "template", "ferry", chart, *arguments, text=json.dumps(values))
    assert done.returncode == 0, done.stderr
    return yaml.safe_load(done.stdout)["notes"]


@pytest.mark.parametrize(("values", "is_told"), [(MODEL, True), (SGLANG, False)], ids=["vllm", "sglang"])
def test_the_notes_name_headers_that_an_answer_has(values, is_told, tmp_path):
    shown = notes_of(values, tmp_path)
    assert ("x-kvferry-path" in shown, "x-kvferry-cache" in shown) == (True, is_told)


def test_the_notes_are_of_this_release(tmp_path):
    shown = notes_of(FULL, tmp_path)
    assert "--namespace inference rollout status deployment/ferry-kvferry-router" in shown
    assert "8000:443" in shown
    assert json.loads(re.search(r"-d '(.*)'", shown)[1])["model"] == "llama"
    page = (ROOT / "docs/kubernetes.md").read_text()
    assert [
        line for line in re.findall(r"^ +(?:- )?\w+: .*[{<].*", shown, re.MULTILINE) if line.strip() not in page
    ] == []


class Cluster(BaseHTTPRequestHandler):
    """As much of an API server as Helm asks for one Secret and one Deployment."""

    def do_GET(self):
        secret = {"metadata": {"name": "ferry-kvferry-token"}, "data": {"token": "a2VwdA=="}}
        kinds = [{"name": "secrets", "kind": "Secret", "namespaced": True, "verbs": ["get"]}]
        apps = [{"name": "deployments", "kind": "Deployment", "namespaced": True, "verbs": ["get"]}]
        decode = {"metadata": {"name": "ferry-kvferry-decode"}, "spec": {"replicas": 8}}
        known = {
            "/api/v1": {"kind": "APIResourceList", "groupVersion": "v1", "resources": kinds},
            "/apis/apps/v1": {"kind": "APIResourceList", "groupVersion": "apps/v1", "resources": apps},
            "/apis/apps/v1/namespaces/inference/deployments/ferry-kvferry-decode": {
                "apiVersion": "apps/v1",
                "kind": "Deployment",
                **decode,
            },
            "/api/v1/namespaces/inference/secrets/ferry-kvferry-token": {
                "apiVersion": "v1",
                "kind": "Secret",
                **secret,
            },
        }
        status = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404}
        answer = known.get(self.path.partition("?")[0], status)
        body = json.dumps(answer).encode()
        self.send_response(404 if answer is status else 200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def kubeconfig(tmp_path):
    """The environment of a Helm that is connected to such a server."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Cluster) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "c",
            "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{server.server_port}"}}],
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
            "users": [{"name": "u", "user": {}}],
        }
        (tmp_path / "config").write_text(yaml.safe_dump(config))
        yield {**os.environ, "KUBECONFIG": str(tmp_path / "config"), "HOME": str(tmp_path)}
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(("namespace", "found"), [("inference", 8), ("elsewhere", None)])
def test_turning_autoscaling_on_ends_no_engine(kubeconfig, namespace, found):
    """A number that is not there any more is 1 for Kubernetes."""
    values = MODEL | {"decode": {"autoscaling": {"enabled": True, "maxReplicas": 12}}}
    arguments = ("--dry-run=server", "--namespace", namespace, "--show-only", "templates/engines.yaml", "--values", "-")
    done = run("helm", "template", "ferry", CHART, *arguments, text=json.dumps(values), env=kubeconfig)
    assert done.returncode == 0, done.stderr
    specs = {each["metadata"]["name"]: each["spec"] for each in yaml.safe_load_all(done.stdout) if each}
    assert specs["ferry-kvferry-decode"].get("replicas") == found
    assert specs["ferry-kvferry-prefill"]["replicas"] == 1


@pytest.mark.parametrize(
    ("model", "more", "found"),
    [
        ("Qwen/Qwen3-8B", {}, "Qwen/Qwen3-8B"),
        ("/models/llama", {}, "llama"),
        ("/models/llama", {"servedName": "ours"}, "ours"),
    ],
)
def test_the_notes_call_a_model_as_engines_do(model, more, found, tmp_path):
    values = {"model": model, "models": {"existingClaim": "claim" if model.startswith("/") else ""}, **more}
    assert json.loads(re.search(r"-d '(.*)'", notes_of(values, tmp_path))[1])["model"] == found


def test_names_that_look_like_numbers_stay_words():
    values = MODEL | {"model": "/models/70", "models": {"existingClaim": "2024", "subPath": "70"}}
    values |= {"token": {"existingSecret": "1", "key": "2"}, "prefill": {"priorityClassName": "1000"}}
    done = run("helm", "template", "on", CHART, "--values", "-", text=json.dumps(values))
    assert done.returncode == 0, done.stderr
    wrong = []

    def look(value, path):
        for key, each in value.items() if isinstance(value, dict) else enumerate(value):
            if isinstance(each, dict | list):
                look(each, (*path, key))
            elif key in ("subPath", "claimName", "priorityClassName", "secretName", "key") or "labels" in path:
                wrong.extend([(*path, key, each)] * (not isinstance(each, str)))

    for document in yaml.safe_load_all(done.stdout):
        look(document or {}, ())
    assert wrong == []


@pytest.mark.parametrize(("namespace", "is_kept"), [("inference", True), ("elsewhere", False)])
def test_the_token_that_is_there_stays(kubeconfig, namespace, is_kept):
    arguments = ("--dry-run=server", "--namespace", namespace, "--show-only", "templates/token.yaml", "--values", "-")
    done = run("helm", "template", "ferry", CHART, *arguments, text=json.dumps(MODEL), env=kubeconfig)
    assert done.returncode == 0, done.stderr
    token = base64.b64decode(yaml.safe_load(done.stdout)["data"]["token"]).decode()
    assert (token == "kept") == is_kept
    assert is_kept or (len(token) >= MIN_TOKEN_BYTES and len(set(token)) >= MIN_DIFFERENT_BYTES)


def test_the_commands_of_the_page_can_be_rendered(tmp_path):
    calls = [words for place, words in calls_of("helm") if "kubernetes.md" in place]
    assert [words[0] for words in calls] == ["install", "install", "upgrade"]
    for words in calls:
        kept = [word for word in words[1:] if word != "--reuse-values"]
        done = run("helm", "template", *kept, *(["--set", "model=m"] if words[0] == "upgrade" else []), cwd=ROOT)
        assert done.returncode == 0, done.stderr
        assert "kind: Deployment" in done.stdout


def test_the_objects_of_the_page_are_those_of_the_chart(rendered):
    table = (ROOT / "docs/kubernetes.md").read_text().partition("### What it makes")[2].partition("###")[0]
    made = {document["kind"] for document in rendered("full")}
    assert {kind for kind in made if kind not in table and kind.replace("Policy", "Policies") not in table} == set()


def test_the_values_of_the_page_have_the_defaults_of_the_chart():
    table = (ROOT / "docs/kubernetes.md").read_text().partition("### Values")[2].partition("## Discovery")[0]
    rows = re.findall(r"^\| (`[^|]+`) \|([^|]*)\|", table, re.MULTILINE)
    assert len(rows) > 12
    for names, shown in rows:
        for name, default in zip_longest(re.findall(r"`([^`]+)`", names), re.findall(r"[^`,\s]+", shown)):
            value = yaml.safe_load((CHART / "values.yaml").read_text())
            for key in name.split("."):
                value = value[key]
            # What is null is in its comment, and in the templates.
            assert value in (None, "", [], {}) if default is None else value is None or str(value) == default, name


def scaling(**values):
    return {"autoscaling": {**SCALED, **values}}


REFUSED = {
    "no model": ({}, "model is empty", "Hugging Face"),
    "an engine that is none": ({**MODEL, "engine": "abacus"}, "abacus", "vllm or sglang or transformers"),
    "SGLang without prefill": (
        {**MODEL, "engine": "sglang", "prefill": {"replicas": 0}},
        "prefill.replicas 0",
        "at least 1",
    ),
    "what SGLang is told by kvferry": (
        {**MODEL, "engine": "sglang", "decode": {"engineArgs": ["--disaggregation-mode=null"]}},
        "--disaggregation-mode",
        "none of",
    ),
    "a transport inside one pod": ({**MODEL, "transport": "cma"}, "cma", "auto or nixl or tcp"),
    "a folder that is not mounted": ({"model": "/models/llama"}, "/models/llama", "models.existingClaim"),
    "no decode engine": ({**MODEL, "decode": {"replicas": 0}}, "decode.replicas 0", "at least 1"),
    "no router": ({**MODEL, "router": {"replicas": 0}}, "router.replicas 0", "at least 1"),
    "too short a grace period": (
        {**MODEL, "decode": {"drainTimeoutSeconds": 60, "terminationGracePeriodSeconds": 60}},
        "terminationGracePeriodSeconds 60",
        "at least 80",
    ),
    "devices without a name": ({**MODEL, "engines": {"rdma": {"count": 1}}}, "count 1", "both"),
    "devices without a number": ({**MODEL, "engines": {"rdma": {"resource": "rdma/ib"}}}, "count 0", "both"),
    "too few for autoscaling": (
        {**MODEL, "decode": scaling(minReplicas=5)},
        "minReplicas 5, maxReplicas 3",
        "at most maxReplicas",
    ),
    "two numbers of replicas": ({**MODEL, "prefill": {"replicas": 2, **scaling()}}, "prefill.replicas 2", "null"),
    "a percentage of nothing": (
        {**MODEL, "router": {**scaling(), "resources": {"requests": {"cpu": None}}}},
        "no router.resources.requests.cpu",
        "one, such as",
    ),
    "a short token": ({**MODEL, "token": {"value": "a" * 8}}, "8 bytes", f"{MIN_TOKEN_BYTES} to {MAX_TOKEN_BYTES}"),
    "a repeated token": ({**MODEL, "token": {"value": "abc" * 20}}, "60 bytes, 3 of them different", "random bytes"),
    "a second token that is short": ({**MODEL, "token": {"value": f"{TOKEN}\n{'a' * 8}"}}, "8 bytes", "random bytes"),
    "no token in it": ({**MODEL, "token": {"value": " \n"}}, "white space", "nothing at all"),
    "tokens that are not text": (
        {**MODEL, "token": {"value": f"{TOKEN}\n{TOKEN}\x01"}},
        "2 lines",
        "printable characters",
    ),
    "many tokens": ({**MODEL, "token": {"value": "\n".join([TOKEN] * 5)}}, "5 lines", "at most 4"),
    "two tokens": ({**MODEL, "token": {"value": TOKEN, "existingSecret": "mine"}}, "token.value", "one of them"),
    "a role": ({**MODEL, "prefill": {"extraArgs": ["--role=prefill"]}}, "--role", "none of"),
    "a key on the command line": ({**MODEL, "router": {"extraArgs": ["--api-key", "k"]}}, "--api-key", "none of"),
    "a key for vLLM": ({**MODEL, "decode": {"engineArgs": ["--api-key", "k"]}}, "--api-key", "none of"),
    "a key in the environment": (
        {**MODEL, "router": {"env": [{"name": "KVFERRY_API_KEY", "value": "k"}]}},
        "KVFERRY_API_KEY with a value",
        "secretKeyRef",
    ),
    "options of vLLM for transformers": (
        {**SMALL, "decode": {"engineArgs": ["--max-model-len", "64"]}},
        "decode.engineArgs with engine transformers",
        "decode.extraArgs",
    ),
    "a key for vLLM with underscores": ({**MODEL, "decode": {"engineArgs": ["--api_key=k"]}}, "--api-key", "none of"),
    "a key for vLLM, shortened": ({**MODEL, "decode": {"engineArgs": ["--api", "k"]}}, "--api", "none of"),
    "a connector for vLLM": ({**MODEL, "decode": {"engineArgs": ["--kv_transfer_config={}"]}}, "--kv-tr", "none of"),
    "one key of a connector": (
        {**MODEL, "prefill": {"engineArgs": ["--kv-transfer-config.kv_role=kv_both"]}},
        "--kv-transfer-config",
        "none of",
    ),
    "nothing but dashes": ({**MODEL, "decode": {"engineArgs": ["--seed", "1", "--"]}}, "--", "none of"),
    "one port for two": ({**MODEL, "engines": {"transferPort": 8000}}, "transferPort 8000", "two ports"),
    "one port for two of transformers": ({**SMALL, "engines": {"transferPort": 8000}}, "transferPort 8000", "1 above"),
    "a port of another rank": ({**MODEL, "engines": {"transferPort": 7998}}, "transferPort 7998", "64 above"),
    "a port of another rank of SGLang": ({**SGLANG, "engines": {"transferPort": 7999}}, "Port 7999", "64 above"),
    "a folder above": ({**MODEL, "models": {"existingClaim": "c", "subPath": "a/../../x"}}, "a/../../x", "without .."),
    "a folder from the root": ({**MODEL, "models": {"existingClaim": "c", "subPath": "/x"}}, "/x", "relative"),
    "metrics that nobody reaches": (
        {**MODEL, "podMonitor": {"enabled": True}},
        "without networkPolicy.metricsNamespaceLabels",
        "kubernetes.io/metadata.name",
    ),
    "a label of ours": (
        {**MODEL, "decode": {"podLabels": {"kvferry.io/role": "x"}}},
        "kvferry.io/role",
        "other labels",
    ),
    "a label with a space": ({**MODEL, "prefill": {"podLabels": {"team": "a b"}}}, 'team: "a b"', "63 letters"),
    "a key with two domains": ({**MODEL, "router": {"nodeSelector": {"a/b/c": "d"}}}, '"a/b/c"', "63 letters"),
    "a long label": ({**MODEL, "podMonitor": {"labels": {"release": "p" * 64}}}, "p" * 64, "63 letters"),
    "a name in capitals": ({**MODEL, "fullnameOverride": "Ferry_X"}, "Ferry_X", "a letter first"),
    "two strategies": ({**MODEL, "decode": {"strategy": {"type": "Recreate"}}}, "Recreate", "rollingUpdate null"),
    "no way to replace": (
        {**MODEL, "decode": {"strategy": {"rollingUpdate": {"maxSurge": 0, "maxUnavailable": 0}}}},
        "maxSurge 0 and maxUnavailable 0",
        "above 0",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_work_is_refused_with_what_was_found_and_expected(what):
    values, found, expected = REFUSED[what]
    done = helm("template", values, "ferry")
    assert done.returncode != 0
    words = re.search(r"^kvferry: .*; found: (.*); expected: (.*)$", done.stderr, re.MULTILINE)
    assert words is not None, done.stderr
    assert found in words[1]
    assert expected in words[2]
    assert TOKEN not in done.stderr


@pytest.mark.parametrize(
    "values",
    [
        {"engines": {"httpPort": 8000, "transferPort": 7936}},
        {"engines": {"httpPort": 80, "transferPort": 81}},
        {**SMALL, "engines": {"transferPort": 7999}},
        {"models": {"existingClaim": "c", "subPath": "a/..b/c..d/.e"}},
        {"decode": {"strategy": {"rollingUpdate": {"maxSurge": "150%", "maxUnavailable": "0%"}}}},
        {"prefill": {"engineArgs": ["--served-model-name", "api_key", "--port-range.low=1", "-tp", "8"]}},
    ],
    ids=str,
)
def test_what_works_is_not_refused(values):
    done = helm("template", {**MODEL, **values}, "ferry")
    assert done.returncode == 0, done.stderr


def test_the_chart_refuses_what_engines_are_not_passed():
    (theirs,) = re.findall(r"\$theirs := list (.*?) -}}", (CHART / "templates/_checks.tpl").read_text())
    assert {*vllm.TAKEN, *sglang.TAKEN} <= set(re.findall(r'"([^"]+)"', theirs))


def test_every_check_of_the_chart_is_tried():
    written = (CHART / "templates/_checks.tpl").read_text()
    whats = re.findall(r'include "kvferry.refuse" \(dict "what"', written)
    assert len(whats) <= len(REFUSED)
    limits = re.search(r"lt \(len \$value\) (\d+)\) \(gt \(len \$value\) (\d+)\) \(lt \$different (\d+)\)", written)
    assert tuple(map(int, limits.groups())) == (MIN_TOKEN_BYTES, MAX_TOKEN_BYTES, MIN_DIFFERENT_BYTES)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"replica": 2}, "replica"),
        ({"prefill": {"replica": 2}}, "replica"),
        ({"decode": {"resources": {"gpu": 1}}}, "gpu"),
        ({"router": {"replicas": "two"}}, "replicas"),
        ({"engines": {"httpPort": 70000}}, "httpPort"),
        ({"engines": {"sharedMemory": {"sizeLimit": "much"}}}, "sizeLimit"),
        ({"prefill": {"replicas": -1}}, "replicas"),
        ({"decode": {"drainTimeoutSeconds": -5}}, "drainTimeoutSeconds"),
        ({"decode": {"drainTimeoutSeconds": 100000}}, "drainTimeoutSeconds"),
        ({"prefill": {"autoscaling": {"minReplicas": 0}}}, "minReplicas"),
        ({"router": {"podDisruptionBudget": {"maxUnavailable": 0}}}, "maxUnavailable"),
        ({"listenHost": "127.0.0.1"}, "listenHost"),
        ({"engines": {"image": {"digest": "latest"}}}, "digest"),
        ({"prefill": {"strategy": {"rollingUpdate": {"maxSurge": "foo"}}}}, "maxSurge"),
        ({"decode": {"strategy": {"rollingUpdate": {"maxUnavailable": "101%"}}}}, "maxUnavailable"),
        ({"router": {"strategy": {"rollingUpdate": {"maxSurge": -1}}}}, "maxSurge"),
        ({"router": {"strategy": {"rollingUpdate": {"foo": 1}}}}, "foo"),
    ],
    ids=str,
)
def test_a_value_of_another_name_or_type_is_refused(values, named):
    done = helm("template", {**MODEL, **values}, "ferry")
    assert done.returncode != 0
    assert "values don't meet the specifications of the schema" in done.stderr
    assert named in done.stderr
