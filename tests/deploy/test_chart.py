"""The Helm chart and the Dockerfile, with the tools that Kubernetes people use. Nothing of it needs a cluster."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
import yaml
from docs_pages import calls_of
from typer.testing import CliRunner

from kvferry.agent.control.shared_token import MAX_TOKEN_BYTES, MIN_DIFFERENT_BYTES, MIN_TOKEN_BYTES
from kvferry.cli import main
from kvferry.cli.serve import engine_process
from kvferry.router.telemetry.metrics import Metrics

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy/kubernetes/kvferry"
DOCKERFILE = ROOT / "deploy/container/Dockerfile"
# `make test-chart` installs them beside Python.
PATH = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
TOOLS = {name: shutil.which(name, path=PATH) for name in ("helm", "kubernetes-validate", "hadolint")}
MISSING = [name for name, path in TOOLS.items() if path is None]
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
VALUES = {"default": MODEL, "small": SMALL, "full": FULL, "bare": BARE}

pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"the extra chart is not installed: {', '.join(MISSING)}")


def run(tool, *arguments, text=None, **more):
    words = [TOOLS[tool], *map(str, arguments)]
    return subprocess.run(words, input=text, capture_output=True, text=True, check=False, timeout=60, **more)


def helm(command, values, *arguments):
    return run("helm", command, *arguments, CHART, "--values", "-", text=json.dumps(values))


@pytest.fixture(scope="module")
def rendered():
    """The documents of a set of values, rendered once."""
    made = {}

    def rendered(name):
        if name not in made:
            done = helm("template", VALUES[name], "ferry", "--namespace", "inference")
            assert done.returncode == 0, done.stderr
            made[name] = [document for document in yaml.safe_load_all(done.stdout) if document]
        return made[name]

    return rendered


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


every = pytest.mark.parametrize("name", VALUES)


@every
def test_lint_finds_nothing(name):
    done = helm("lint", VALUES[name], "--strict")
    assert done.returncode == 0, done.stdout


@every
def test_every_document_is_valid_in_the_oldest_and_the_newest_kubernetes(name, rendered, tmp_path):
    known = [document for document in rendered(name) if document["kind"] not in CUSTOM]
    file = tmp_path / "all.yaml"
    file.write_text(yaml.safe_dump_all(known))
    for version in KUBERNETES:
        done = run("kubernetes-validate", "--strict", "--kubernetes-version", version, file)
        assert done.returncode == 0, done.stdout + done.stderr
        assert (done.stdout + done.stderr).count(" passed ") == len(known)


def test_what_is_misspelled_would_be_found(rendered, tmp_path):
    document = dict(of_kind(rendered("default"), "Deployment")["decode"])
    document["spec"] = {**document["spec"], "replica": 1}
    file = tmp_path / "one.yaml"
    file.write_text(yaml.safe_dump(document))
    done = run("kubernetes-validate", "--strict", "--kubernetes-version", KUBERNETES[-1], file)
    assert done.returncode != 0
    assert "replica" in done.stdout + done.stderr


@pytest.mark.parametrize("name", ["default", "small", "full", "bare"])
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_kvferry_serve_takes_the_command_line(name, role, rendered, monkeypatch, tmp_path):
    """All of it is checked as at a start, up to the moment where the engine would be loaded."""
    engine = container(pods(rendered(name))[role])
    token = tmp_path / "token"
    token.write_text(TOKEN)
    token.chmod(0o400)
    known = {
        "$(POD_IP)": "127.0.0.1",
        "$(POD_NAME)": f"ferry-{role}",
        f"/etc/kvferry/{after(engine['args'], '--token-file').rpartition('/')[2]}": str(token),
    }
    words = [*engine["command"][1:], *(known.get(word, word) for word in engine["args"])]
    given = {}
    monkeypatch.setattr("kvferry.cli.serve.command.check_engine", lambda *_: None)
    monkeypatch.setattr("kvferry.cli.models.resolve", lambda model: (model, model))
    monkeypatch.setattr("kvferry.cli.serve.vllm.serve_vllm", lambda options: given.update(vllm=options) or 0)
    monkeypatch.setattr("kvferry.cli.serve.embedded.serve", lambda options, *_: given.update(transformers=options))
    result = CliRunner().invoke(main.app, words)
    assert result.exit_code == 0, result.output
    ((chosen, options),) = given.items()
    assert chosen == VALUES[name].get("engine", "vllm")
    assert (options.host, options.port, options.transfer_port) == (
        VALUES[name].get("listenHost", "0.0.0.0"),
        8000,
        5600,
    )
    assert options.drain_timeout == float(after(engine["args"], "--drain-timeout"))
    assert list(options.arguments) == VALUES[name].get(role, {}).get("engineArgs", [])


@every
def test_kvferry_route_takes_the_command_line(name, rendered, monkeypatch):
    router = container(pods(rendered(name))["router"])
    given = []
    monkeypatch.setattr("kvferry.cli.route.server.route", given.append)
    result = CliRunner().invoke(main.app, [*router["command"][1:], *router["args"]])
    assert result.exit_code == 0, result.output
    (options,) = given
    assert options.pods.kubernetes_selector == after(router["args"], "--kubernetes-selector")
    assert options.drain_timeout == float(after(router["args"], "--drain-timeout"))


@every
def test_the_router_selects_the_engines_and_nothing_else(name, rendered):
    router = container(pods(rendered(name))["router"])
    wanted = [each.partition("=") for each in after(router["args"], "--kubernetes-selector").split(",")]
    for component, deployment in of_kind(rendered(name), "Deployment").items():
        labels = deployment["spec"]["template"]["metadata"]["labels"]
        selected = all(labels.get(key) == value if equals else key in labels for key, equals, value in wanted)
        assert selected == (component != "router")
        assert labels.get("kvferry.io/role") == (component if selected else None)
        ports = {port["name"] for port in container(deployment["spec"]["template"]["spec"])["ports"]}
        assert after(router["args"], "--kubernetes-port") in ports


@every
def test_every_pod_may_drain_before_it_is_killed(name, rendered):
    for pod in pods(rendered(name)).values():
        drain_s = int(after(container(pod)["args"], "--drain-timeout"))
        pause_s = container(pod).get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
        # `kvferry serve` gives an engine's server some seconds of its own to end.
        assert pod["terminationGracePeriodSeconds"] > drain_s + pause_s + engine_process.STOP_S
        assert pause_s == VALUES[name].get("preStopSeconds", 5)


def test_no_engine_may_take_longer_to_start_than_kvferry_waits(rendered):
    probe = container(pods(rendered("default"))["decode"])["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] == engine_process.READY_S
    checked = (CHART / "templates/_checks.tpl").read_text()
    assert f"startupTimeoutSeconds) {engine_process.READY_S:g})" in checked


@every
def test_only_the_router_may_talk_to_the_api_and_only_read_pods(name, rendered):
    documents = rendered(name)
    may = {component: pod["automountServiceAccountToken"] for component, pod in pods(documents).items()}
    assert may == {"prefill": False, "decode": False, "router": True}
    assert "serviceAccountName" not in pods(documents)["prefill"]
    (account,) = of_kind(documents, "ServiceAccount").values()
    (role,) = of_kind(documents, "Role").values()
    (binding,) = of_kind(documents, "RoleBinding").values()
    assert pods(documents)["router"]["serviceAccountName"] == account["metadata"]["name"]
    assert role["rules"] == [{"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}]
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    (subject,) = binding["subjects"]
    assert (subject["name"], subject["namespace"]) == (account["metadata"]["name"], "inference")
    assert not {"ClusterRole", "ClusterRoleBinding"} & {document["kind"] for document in documents}


@every
def test_a_secret_is_only_in_the_secret_and_a_file(name, rendered):
    documents = rendered(name)
    secrets = of_kind(documents, "Secret")
    assert len(secrets) == (0 if name == "bare" else 1)
    values = [value for secret in secrets.values() for value in secret["data"].values()]
    others = json.dumps([document for document in documents if document["kind"] != "Secret"])
    assert not any(value in others for value in values)
    assert TOKEN not in others
    for role, pod in pods(documents).items():
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        if role == "router":
            assert "token" not in volumes
            continue
        wanted = VALUES[name].get("token", {}).get("existingSecret") or "ferry-kvferry-token"
        assert volumes["token"]["secret"]["secretName"] == wanted
        # Kubernetes gives the file to root and this group, and others must not read it.
        assert volumes["token"]["secret"]["defaultMode"] == 0o440
        assert pod["securityContext"]["fsGroup"] == pod["securityContext"]["runAsGroup"]
        assert after(container(pod)["args"], "--token-file").startswith("/etc/kvferry/")
        assert all("valueFrom" in each for each in container(pod)["env"] if each["name"].endswith("TOKEN"))


@every
def test_pods_have_no_more_rights_than_they_need(name, rendered):
    for role, pod in pods(rendered(name)).items():
        rdma = name == "full" and role != "router"
        inside = container(pod)["securityContext"]
        assert inside["capabilities"] == {"drop": ["ALL"], **({"add": ["IPC_LOCK"]} if rdma else {})}
        assert inside["allowPrivilegeEscalation"] is False
        assert inside["readOnlyRootFilesystem"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["securityContext"]["runAsNonRoot"] == (pod["securityContext"]["runAsUser"] != 0)
        assert pod["enableServiceLinks"] is False
        assert not {"hostNetwork", "hostPID", "hostIPC", "shareProcessNamespace"} & pod.keys()
        mounted = {mount["name"] for mount in container(pod)["volumeMounts"]}
        assert mounted == {volume["name"] for volume in pod["volumes"]}


def test_devices_models_and_memory_of_a_full_engine(rendered):
    pod = pods(rendered("full"))["prefill"]
    assert container(pod)["resources"]["limits"] == {"nvidia.com/gpu": 4, "memory": "64Gi", "rdma/ib": "2"}
    assert container(pod)["image"] == f"registry.example.com/team/kvferry-vllm:{version()}"
    mounts = {mount["mountPath"]: mount for mount in container(pod)["volumeMounts"]}
    assert mounts["/models"] == {"name": "models", "mountPath": "/models", "readOnly": True, "subPath": "here"}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert volumes[mounts["/dev/shm"]["name"]]["emptyDir"] == {"medium": "Memory", "sizeLimit": "16Gi"}
    assert volumes["models"]["persistentVolumeClaim"] == {"claimName": "models", "readOnly": True}


@every
def test_selectors_are_of_labels_that_never_change(name, rendered):
    documents = rendered(name)
    for component, deployment in of_kind(documents, "Deployment").items():
        selected = deployment["spec"]["selector"]["matchLabels"]
        assert set(selected) == {f"app.kubernetes.io/{key}" for key in ("name", "instance", "component")}
        labels = deployment["spec"]["template"]["metadata"]["labels"]
        assert selected.items() <= labels.items()
        assert labels["app.kubernetes.io/version"] == version()
        assert labels["app.kubernetes.io/managed-by"] == "Helm"
        # A new version of the chart alone restarts nothing.
        assert "helm.sh/chart" not in labels
        budget = of_kind(documents, "PodDisruptionBudget").get(component)
        assert (budget is None) == (name == "bare" and component == "prefill")
        assert budget is None or budget["spec"]["selector"] == deployment["spec"]["selector"]
    (service,) = of_kind(documents, "Service").values()
    router = of_kind(documents, "Deployment")["router"]["spec"]
    assert service["spec"]["selector"] == router["selector"]["matchLabels"]
    names = {port["name"] for port in container(router["template"]["spec"])["ports"]}
    assert {port["targetPort"] for port in service["spec"]["ports"]} <= names


@pytest.mark.parametrize("name", ["default", "full"])
def test_network_policies_name_ports_and_pods_that_exist(name, rendered):
    documents = rendered(name)
    labels = {n: d["spec"]["template"]["metadata"]["labels"] for n, d in of_kind(documents, "Deployment").items()}
    ports = {n: {port["name"] for port in container(pod)["ports"]} for n, pod in pods(documents).items()}
    policies = of_kind(documents, "NetworkPolicy")
    chosen = {"engines": {"prefill", "decode"}, "router": {"router"}}
    assert policies.keys() == chosen.keys()
    for policy, components in chosen.items():
        spec = policies[policy]["spec"]
        assert {each for each in labels if labels_select(spec["podSelector"], labels[each])} == components
        for rule in spec["ingress"]:
            assert all(port["port"] in ports[each] for port in rule.get("ports", ()) for each in components)
    router, engines, *metrics = policies["engines"]["spec"]["ingress"]
    (peer,), (router_peer,) = engines["from"], router["from"]
    assert {each for each in labels if labels_select(peer["podSelector"], labels[each])} == {"prefill", "decode"}
    assert {each for each in labels if labels_select(router_peer["podSelector"], labels[each])} == {"router"}
    # A transport's ports are the system's choice.
    assert "ports" not in engines
    assert len(metrics) == (name == "full")


def test_probes_ask_what_engines_and_routers_serve(rendered):
    for pod in pods(rendered("default")).values():
        asked = {probe: container(pod)[f"{probe}Probe"]["httpGet"] for probe in ("startup", "liveness", "readiness")}
        assert [asked[each]["path"] for each in asked] == ["/health", "/health", "/ready"]
        assert {each["port"] for each in asked.values()} == {"http"}


def test_autoscaling_asks_for_metrics_that_the_router_has(rendered):
    written = Path(sys.modules[Metrics.__module__].__file__).read_text()
    scalers = of_kind(rendered("full"), "HorizontalPodAutoscaler")
    assert scalers.keys() == {"prefill", "decode", "router"}
    for component, scaler in scalers.items():
        target = of_kind(rendered("full"), scaler["spec"]["scaleTargetRef"]["kind"])[component]
        assert scaler["spec"]["scaleTargetRef"]["name"] == target["metadata"]["name"]
        assert "replicas" not in target["spec"]
        (metric,) = scaler["spec"]["metrics"]
        if component != "router":
            asked = metric["external"]["metric"]
            assert f'"{asked["name"]}"' in written
            assert asked["name"] in (ROOT / "docs/kubernetes.md").read_text()
            assert asked["selector"]["matchLabels"]["role"] == component
            # A label of a pod, as Prometheus writes it.
            (label,) = asked["selector"]["matchLabels"].keys() - {"role"}
            (monitor,) = of_kind(rendered("full"), "PodMonitor").values()
            assert label in {re.sub(r"[^a-zA-Z0-9]", "_", each) for each in monitor["spec"]["podTargetLabels"]}


def test_a_pod_monitor_finds_all_pods_and_keeps_the_label_instance(rendered):
    documents = rendered("full")
    (monitor,) = of_kind(documents, "PodMonitor").values()
    assert monitor["apiVersion"] == "monitoring.coreos.com/v1"
    assert monitor["metadata"]["labels"]["release"] == "prometheus"
    assert monitor["spec"].keys() == {"selector", "podTargetLabels", "podMetricsEndpoints"}
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert endpoint["honorLabels"] is True
    for deployment in of_kind(documents, "Deployment").values():
        template = deployment["spec"]["template"]
        assert labels_select(monitor["spec"]["selector"], template["metadata"]["labels"])
        assert endpoint["port"] in {port["name"] for port in container(template["spec"])["ports"]}
    assert of_kind(rendered("default"), "PodMonitor") == {}


def test_the_dashboard_is_the_one_of_the_documents(rendered):
    (dashboard,) = of_kind(rendered("full"), "ConfigMap").values()
    assert dashboard["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert dashboard["data"]["kvferry.json"].strip() == (ROOT / "docs/grafana/kvferry.json").read_text().strip()
    assert (CHART / "files/kvferry.json").is_symlink()


def version():
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


def test_chart_and_images_are_of_this_version():
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert str(chart["appVersion"]) == version()
    assert set(re.findall(r"KVFERRY_VERSION=(\S+)", DOCKERFILE.read_text())) == {version()}
    user = re.search(r"USER (\d+):(\d+)", DOCKERFILE.read_text()).groups()
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert user == (str(values["engines"]["runAsUser"]), str(values["engines"]["runAsGroup"]))


def test_every_value_has_a_comment_and_a_place_in_the_schema():
    schema = json.loads((CHART / "values.schema.json").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())

    def compare(values, schema, place):
        schema = schema if "$ref" not in schema else resolve(schema["$ref"])
        if "properties" in schema:
            assert schema["additionalProperties"] is False, place
            missing = set(values) ^ (set(schema["properties"]) - {"global", "claims", "limits", "requests"})
            assert place.endswith("resources") or place.endswith("resources.") or not missing, (place, missing)
            for key, value in values.items():
                if isinstance(value, dict):
                    compare(value, schema["properties"][key], f"{place}{key}.")

    def resolve(reference):
        return schema["definitions"][reference.rpartition("/")[2]]

    compare(values, schema, "")


@pytest.mark.parametrize("image", ["", "image"])
def test_the_dockerfile_has_nothing_that_hadolint_finds(image):
    done = run("hadolint", "-" if image else DOCKERFILE, text="FROM python\nRUN pip install x\n" if image else None)
    assert (done.returncode == 0) == (not image), done.stdout
    assert "hadolint ignore" not in DOCKERFILE.read_text()


def test_the_notes_are_of_this_release(tmp_path):
    """Helm shows notes only when it installs, so this copy of the chart has them in an object."""
    chart = shutil.copytree(CHART, tmp_path / "chart")
    notes = (chart / "templates/NOTES.txt").read_text()
    written = f'{{{{- define "notes" -}}}}\n{notes}\n{{{{- end -}}}}\nkind: Notes\nnotes: {{{{ include "notes" . | quote }}}}\n'
    (chart / "templates/notes.yaml").write_text(written)
    arguments = ("--namespace", "inference", "--show-only", "templates/notes.yaml", "--values", "-")
    done = run("helm", "template", "ferry", chart, *arguments, text=json.dumps(FULL))
    assert done.returncode == 0, done.stderr
    shown = yaml.safe_load(done.stdout)["notes"]
    assert "--namespace inference rollout status deployment/ferry-kvferry-router" in shown
    assert "8000:443" in shown
    assert json.loads(re.search(r"-d '(.*)'", shown)[1])["model"] == "llama"
    page = (ROOT / "docs/kubernetes.md").read_text()
    assert [
        line for line in re.findall(r"^ +(?:- )?\w+: .*[{<].*", shown, re.MULTILINE) if line.strip() not in page
    ] == []


class Cluster(BaseHTTPRequestHandler):
    """As much of an API server as Helm asks for one Secret."""

    def do_GET(self):
        secret = {"metadata": {"name": "ferry-kvferry-token"}, "data": {"token": "a2VwdA=="}}
        kinds = [{"name": "secrets", "kind": "Secret", "namespaced": True, "verbs": ["get"]}]
        known = {
            "/api/v1": {"kind": "APIResourceList", "groupVersion": "v1", "resources": kinds},
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


def test_the_objects_and_values_of_the_page_are_those_of_the_chart(rendered):
    page = (ROOT / "docs/kubernetes.md").read_text()
    assert {document["kind"] for document in rendered("full")} - {"Service", "Secret"} <= set(
        re.findall(r"(\w+?)s?\b", page)
    ) | {"NetworkPolicy"}
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    rows = re.findall(
        r"^\| (`[a-z]+[^|]*`) \| ([^|]*) \|", page.partition("### Values")[2].partition("## Disc")[0], re.M
    )
    assert len(rows) > 12
    for names, defaults in rows:
        given = [each.strip("` ") for each in defaults.split(",")]
        for number, name in enumerate(re.findall(r"`([^`]+)`", names)):
            value = values
            for key in name.split("."):
                value = value[key]
            if any(given) and value is not None:
                assert str(value) == given[min(number, len(given) - 1)], name


def scaling(**values):
    return {"autoscaling": {**SCALED, **values}}


REFUSED = {
    "no model": ({}, "model is empty", "Hugging Face"),
    "an engine that is none": ({**MODEL, "engine": "abacus"}, "abacus", "vllm or transformers"),
    "SGLang": ({**MODEL, "engine": "sglang"}, "sglang", "vllm or transformers"),
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
    "one port for two": ({**MODEL, "engines": {"transferPort": 8000}}, "8000", "two ports"),
    "longer than kvferry waits": ({**MODEL, "engines": {"startupTimeoutSeconds": 900}}, "900", "at most 600"),
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
    ],
    ids=str,
)
def test_a_value_of_another_name_or_type_is_refused(values, named):
    done = helm("template", {**MODEL, **values}, "ferry")
    assert done.returncode != 0
    assert "values don't meet the specifications of the schema" in done.stderr
    assert named in done.stderr
