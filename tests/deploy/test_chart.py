"""The chart's objects, rendered without a cluster: Kubernetes takes them, kvferry takes their command lines."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
import yaml
from chart_support import (
    CHART,
    CUSTOM,
    DIGESTED,
    DOCKERFILE,
    KUBERNETES,
    ROOT,
    TOKEN,
    VALUES,
    after,
    container,
    helm,
    labels_select,
    needs_tools,
    of_kind,
    pods,
    run,
    version,
)
from typer.testing import CliRunner

from kvferry.cli import main
from kvferry.cli.serve import engine_process
from kvferry.router.telemetry.metrics import Metrics

pytestmark = needs_tools
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
    for each in KUBERNETES:
        done = run("kubernetes-validate", "--strict", "--kubernetes-version", each, file)
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


@every
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_kvferry_serve_takes_the_command_line(name, role, rendered, served):
    engine = container(pods(rendered(name))[role])
    assert after(engine["args"], "--token-file").startswith("/etc/kvferry/")
    chosen, options = served(engine)
    assert chosen == VALUES[name].get("engine", "vllm")
    # Nobody asks a decode server of SGLang for a cache, and only SGLang's have one role.
    transfer_port = 0 if (chosen, role) == ("sglang", "decode") else 5600
    roles = [role] if chosen == "sglang" else []
    listens = (VALUES[name].get("listenHost", "0.0.0.0"), 8000, transfer_port)
    assert (options.host, options.port, options.transfer_port, options.join.role) == (*listens, roles)
    ports = {port["name"]: port["containerPort"] for port in engine["ports"]}
    assert ports == {"http": 8000, **({"control": transfer_port} if transfer_port else {})}
    assert options.drain_timeout == float(after(engine["args"], "--drain-timeout"))
    ours = ["--enable-metrics"] if chosen == "sglang" else []
    assert list(options.arguments) == [*ours, *VALUES[name].get(role, {}).get("engineArgs", [])]


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


@pytest.mark.parametrize("name", VALUES)
def test_an_engine_that_waits_for_the_device_of_one_that_drains_is_no_failed_rollout(name, rendered):
    for role in ("prefill", "decode"):
        spec = of_kind(rendered(name), "Deployment")[role]["spec"]
        pod = spec["template"]["spec"]
        probe = container(pod)["startupProbe"]
        starts_s = probe["periodSeconds"] * probe["failureThreshold"]
        assert spec["progressDeadlineSeconds"] > starts_s + pod["terminationGracePeriodSeconds"]


def test_kvferry_gives_an_engine_up_a_little_before_the_probe_does(rendered):
    engine = container(pods(rendered("default"))["decode"])
    probe = engine["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] == int(after(engine["args"], "--start-timeout")) + 30


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
def test_every_object_is_in_the_namespace_of_the_release(name, rendered):
    """So that `helm template | kubectl apply` puts them where the binding of the role expects them."""
    assert {document["metadata"]["namespace"] for document in rendered(name)} == {"inference"}


def test_images_may_be_named_by_their_digest(rendered):
    for role, pod in pods(rendered("strict")).items():
        name = "router" if role == "router" else "vllm"
        tag = f"{version()}@{DIGESTED['digest']}"
        assert container(pod)["image"] == f"registry.example.com/kvferry-{name}:{tag}"


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
        assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()
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


@pytest.mark.parametrize("name", ["default", "sglang"])
def test_probes_ask_what_engines_and_routers_serve(name, rendered):
    for component, pod in pods(rendered(name)).items():
        ready = "/health" if name == "sglang" and component != "router" else "/ready"
        asked = {probe: container(pod)[f"{probe}Probe"]["httpGet"] for probe in ("startup", "liveness", "readiness")}
        assert [asked[each]["path"] for each in asked] == ["/health", "/health", ready]
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


def test_chart_and_images_are_of_this_version():
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert str(chart["appVersion"]) == version()
    assert set(re.findall(r"KVFERRY_VERSION=(\S+)", DOCKERFILE.read_text())) == {version()}
    user = re.search(r"USER (\d+):(\d+)", DOCKERFILE.read_text()).groups()
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert user == (str(values["engines"]["runAsUser"]), str(values["engines"]["runAsGroup"]))


@pytest.mark.parametrize("image", ["", "image"])
def test_the_dockerfile_has_nothing_that_hadolint_finds(image):
    done = run("hadolint", "-" if image else DOCKERFILE, text="FROM python\nRUN pip install x\n" if image else None)
    assert (done.returncode == 0) == (not image), done.stdout
    assert "hadolint ignore" not in DOCKERFILE.read_text()
