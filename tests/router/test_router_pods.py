"""Which instances pods are: pure; and the official client before an API server that forgets, refuses and ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from urllib.parse import urlsplit

import pytest
from cluster_api import NAMESPACE, ClusterApi, pod, serving_api
from router_harness import cluster, decode_engine, prefill_engine

from kvferry.errors import ConfigurationError
from kvferry.router.config import PodSelection, PolicySettings, RouterConfig
from kvferry.router.discovery import pod_watch
from kvferry.router.discovery.pod_watch import PodWatch
from kvferry.router.discovery.pods import KnownPods, Pod, Unusable, check_selection, decode, instance_of
from kvferry.router.discovery.section import Section
from kvferry.router.fleet.instance import Origin
from kvferry.router.fleet.instance_pool import InstancePool
from kvferry.router.fleet.probes import Prober
from kvferry.router.policy.records import Instance, Role
from kvferry.router.telemetry.metrics import Metrics

SELECTION = PodSelection("app=kvferry", NAMESPACE)
P0, D0 = Instance("http://10.0.0.1:8000", Role.PREFILL), Instance("http://10.0.0.2:8000", Role.DECODE)


def read(one: dict) -> Pod:
    return decode(json.dumps(one).encode(), Pod)


def test_a_pod_is_an_instance_by_its_label_address_and_named_port():
    assert instance_of(read(pod("p")), SELECTION) == P0
    assert instance_of(read(pod("d", "decode", "10.0.0.2")), SELECTION) == D0
    assert instance_of(read(pod("p", ip="fd00::7")), SELECTION) == Instance("http://[fd00::7]:8000", Role.PREFILL)


def test_a_sidecar_that_is_an_initial_container_may_be_what_serves():
    one = pod("p", port=8200)
    one["spec"]["containers"][0]["ports"][0]["name"] = "vllm"
    one["spec"]["initContainers"] = [
        {"ports": [{"containerPort": 1, "name": "http"}]},
        {"ports": [{"containerPort": 8000, "name": "http"}], "restartPolicy": "Always"},
    ]
    assert instance_of(read(one), SELECTION) == P0
    # As Services choose: the pod's own containers come first.
    one["spec"]["containers"].append({"ports": [{"containerPort": 8100, "name": "http"}]})
    assert instance_of(read(one), SELECTION) == Instance("http://10.0.0.1:8100", Role.PREFILL)
    one["spec"]["containers"].pop()
    by_name = PodSelection("app=kvferry", port="vllm")
    assert instance_of(read(one), by_name) == Instance("http://10.0.0.1:8200", Role.PREFILL)
    by_number = PodSelection("app=kvferry", port="9000")
    assert instance_of(read(one), by_number) == Instance("http://10.0.0.1:9000", Role.PREFILL)


def test_labels_of_others_say_the_role_where_they_are_named():
    one = pod("p", role=None)
    one["metadata"]["labels"]["llm-d.ai/role"] = "decode"
    assert instance_of(read(one), PodSelection("x", role_label="llm-d.ai/role")) == Instance(P0.url, Role.DECODE)


@pytest.mark.parametrize(
    "change",
    [
        {"status": {"phase": "Pending"}},
        {"status": {"phase": "Succeeded", "podIP": "10.0.0.1"}},
        {"status": {"phase": "Failed", "podIP": "10.0.0.1"}},
        {
            "metadata": {
                "uid": "u",
                "labels": {"kvferry.io/role": "decode"},
                "deletionTimestamp": "2026-11-27T00:00:00Z",
            }
        },
        {
            "metadata": {
                "uid": "u",
                "labels": {"kvferry.io/role": "decode", "leaderworkerset.sigs.k8s.io/worker-index": "1"},
            }
        },
    ],
    ids=["without an address", "succeeded", "failed", "terminating", "worker of a leader"],
)
def test_a_pod_may_be_nothing_yet_or_nothing_any_more(change):
    assert instance_of(read(pod("p") | change), SELECTION) is None


def test_the_leader_of_several_pods_is_an_instance():
    one = pod("p")
    one["metadata"]["labels"]["leaderworkerset.sigs.k8s.io/worker-index"] = "0"
    assert instance_of(read(one), SELECTION) == P0


def test_a_pod_that_cannot_be_used_says_what_was_found_and_expected():
    assert instance_of(read(pod("p", "router")), SELECTION) == Unusable(
        "label kvferry.io/role: found 'router'; expected: prefill or decode"
    )
    one = pod("p")
    one["spec"]["containers"][0]["ports"] = [{"containerPort": 9000}, {"containerPort": 1, "name": "metrics"}]
    assert instance_of(read(one), SELECTION) == Unusable(
        "port: found 9000, metrics; expected: a container port named 'http'"
    )
    one["spec"]["containers"][0]["ports"] = []
    assert instance_of(read(one), SELECTION) == Unusable("port: found none; expected: a container port named 'http'")
    assert "invalid URL" in instance_of(read(pod("p", ip="10.0.0.1/x?y")), SELECTION).reason


def test_an_address_that_is_another_pods_a_moment_later_stays():
    known = KnownPods(SELECTION)
    assert known.put(read(pod("old"))) == []
    assert known.put(read(pod("new"))) == []
    known.remove("uid-old")
    assert known.instances == {P0}
    known.remove("uid-new")
    assert known.instances == frozenset()


def test_a_pod_is_warned_of_once_and_again_when_it_is_another():
    known = KnownPods(SELECTION)
    bad = read(pod("p", "router"))
    words = ["pod p gets no requests: label kvferry.io/role: found 'router'; expected: prefill or decode"]
    assert (known.put(bad), known.put(bad)) == (words, [])
    assert known.replace([bad]) == []
    assert known.replace([]) == []
    assert known.replace([bad]) == words
    assert known.put(read(pod("p"))) == []
    assert known.put(bad) == words
    assert known.instances == frozenset()


@pytest.mark.parametrize(
    ("selection", "words"),
    [
        (PodSelection(" "), "--kubernetes-selector is empty"),
        (PodSelection("a=b", role_label="kvferry.io/"), "--kubernetes-role-label"),
        (PodSelection("a=b", role_label="UPPER.io/role"), "--kubernetes-role-label"),
        (PodSelection("a=b", namespace="Inference"), "--kubernetes-namespace"),
        (PodSelection("a=b", namespace="n" * 64), "--kubernetes-namespace"),
        (PodSelection("a=b", port="0"), "--kubernetes-port"),
        (PodSelection("a=b", port="65536"), "--kubernetes-port"),
        (PodSelection("a=b", port="Http"), "--kubernetes-port"),
        (PodSelection("a=b", port="a-name-that-is-long"), "--kubernetes-port"),
        (PodSelection("a=b", port="a--b"), "--kubernetes-port"),
    ],
)
def test_what_no_cluster_would_take_is_refused(selection, words):
    with pytest.raises(ConfigurationError, match=words):
        check_selection(selection)


@pytest.mark.parametrize("port", ["http", "1", "65535", "x-2"])
def test_what_a_cluster_takes_is_not(port):
    wanted = PodSelection("a in (b, c),!d", "inference-1", "llm-d.ai/role", port)
    assert check_selection(wanted) == wanted


# --- before an API server ---


class Watched:
    """A watch that runs, and the pool that it fills."""

    def __init__(self, api: ClusterApi, folder, selection=SELECTION, pause=asyncio.sleep) -> None:
        self.api = api
        self.pool = InstancePool((), Metrics(), PolicySettings())
        kubeconfig = api.kubeconfig(folder / "kubeconfig")
        self.watch = PodWatch(selection, Section(self.pool, Origin.KUBERNETES), kubeconfig, pause)

    async def until(self, *instances: Instance) -> None:
        async with asyncio.timeout(10):
            while set(self.pool.instances) != set(instances):
                await asyncio.sleep(0.005)

    async def until_watching(self) -> None:
        await asyncio.wait_for(self.api.watching.wait(), 10)
        self.api.watching.clear()


@pytest.fixture(autouse=True)
def _soon(monkeypatch):
    monkeypatch.setattr(pod_watch, "RETRY_S", 0.02)


@contextlib.asynccontextmanager
async def watching(folder, selection=SELECTION, pause=asyncio.sleep, **settings):
    async with serving_api(**settings) as api:
        watched = Watched(api, folder, selection, pause)
        task = asyncio.create_task(watched.watch.run())
        try:
            yield watched
        finally:
            task.cancel()
            await asyncio.wait([task])
            await watched.watch.aclose()


async def test_pods_come_change_and_go(tmp_path):
    async with watching(tmp_path, pods={"p": pod("p")}, token="secret") as watched:
        await watched.until(P0)
        await watched.until_watching()
        watched.api.put(pod("d", "decode", ""))
        watched.api.put(pod("d", "decode", "10.0.0.2"))
        await watched.until(P0, D0)
        watched.api.put(pod("p", deletionTimestamp="2026-11-27T00:00:00Z"))
        await watched.until(D0)
        watched.api.delete("p")
        watched.api.delete("d")
        await watched.until()
        first, second, *others = watched.api.asked
        assert first == {"labelSelector": "app=kvferry"}
        assert second["labelSelector"] == "app=kvferry"
        assert (second["resourceVersion"], second["allowWatchBookmarks"].lower()) == ("100", "true")
        # It was watched, not asked again.
        assert others == []


async def test_a_watch_that_ends_goes_on_from_where_it_was(tmp_path):
    async with watching(tmp_path, pods={"p": pod("p")}) as watched:
        await watched.until_watching()
        watched.api.bookmark()
        watched.api.break_watches()
        await watched.until_watching()
        watched.api.put(pod("d", "decode", "10.0.0.2"))
        await watched.until(P0, D0)
        lists = [query for query in watched.api.asked if "watch" not in query]
        assert len(lists) == 1
        assert watched.api.asked[-1]["resourceVersion"] == "101"


async def test_after_a_version_that_is_gone_everything_is_listed_anew(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    async with watching(tmp_path, pods={"p": pod("p")}) as watched:
        await watched.until_watching()
        del watched.api.pods["p"]
        watched.api.pods["d"] = pod("d", "decode", "10.0.0.2")
        watched.api.forget()
        await watched.until(D0)
    assert "the watch of pods begins anew: 410 too old resource version: 100" in caplog.text


async def test_while_the_api_refuses_or_says_nonsense_instances_stay(tmp_path, caplog):
    async with watching(tmp_path, pods={"p": pod("p")}) as watched:
        await watched.until_watching()
        watched.api.refusal = 500, "etcd is away"
        watched.api.break_watches()
        async with asyncio.timeout(10):
            while "instances stay as they are: 500 etcd is away" not in caplog.text:
                await asyncio.sleep(0.005)
        assert watched.pool.instances == (P0,)
        watched.api.refusal = None
        watched.api.pods["d"] = pod("d", "decode", "10.0.0.2")
        await watched.until(P0, D0)
        watched.api.history.append((10_000, "ADDED", ["no object"]))
        watched.api.version = 10_000
        watched.api.put(pod("q", "prefill", "10.0.0.3"))
        await watched.until(P0, D0, Instance("http://10.0.0.3:8000", Role.PREFILL))
    assert "a pod cannot be read: Expected `object`, got `array`" in caplog.text


async def test_a_pod_that_cannot_be_read_keeps_nobody_from_the_others(tmp_path, caplog):
    async with watching(tmp_path, pods={"bad": {"metadata": {"uid": 7}}, "p": pod("p")}) as watched:
        await watched.until(P0)
        await watched.until_watching()
        watched.api.put({"metadata": {"name": "worse", "uid": "u"}, "spec": "none"})
        watched.api.put(pod("d", "decode", "10.0.0.2"))
        await watched.until(P0, D0)
        assert len([query for query in watched.api.asked if "watch" not in query]) == 1
    assert "a pod cannot be read: Expected `str`, got `int` - at `$.metadata.uid`" in caplog.text
    assert "a pod cannot be read: Expected `object`, got `str` - at `$.spec`" in caplog.text


async def test_nonsense_in_the_place_of_events_begins_the_watch_anew(tmp_path, caplog):
    async with watching(tmp_path, pods={"p": pod("p")}) as watched:
        await watched.until_watching()
        watched.api.talk_nonsense()
        await watched.until_watching()
        watched.api.put(pod("d", "decode", "10.0.0.2"))
        await watched.until(P0, D0)
    assert "instances stay as they are: ValidationError: Expected `str`, got `int` - at `$.type`" in caplog.text


class Pauses(list):
    """Between two watches; none takes any time."""

    async def __call__(self, seconds):
        self.append(seconds)
        await asyncio.sleep(0)


async def test_a_server_that_ends_every_watch_at_once_is_asked_less_and_less(tmp_path, monkeypatch):
    monkeypatch.setattr(pod_watch, "RETRY_S", 1000.0)
    monkeypatch.setattr(pod_watch, "MAX_RETRY_S", 3000.0)
    pauses = Pauses()
    async with watching(tmp_path, pods={"p": pod("p")}, pause=pauses) as watched:
        for _ in range(4):
            await watched.until_watching()
            watched.api.break_watches()
        await watched.until_watching()
    assert pauses[:4] == [1000.0, 2000.0, 3000.0, 3000.0]


async def test_after_a_watch_that_went_well_for_a_while_no_pause_is_long(tmp_path, monkeypatch):
    """As behind a proxy that cuts every connection after some seconds."""
    monkeypatch.setattr(pod_watch, "RETRY_S", 1e-9)
    pauses = Pauses()
    async with watching(tmp_path, pods={"p": pod("p")}, pause=pauses) as watched:
        for _ in range(4):
            await watched.until_watching()
            watched.api.talk_nonsense()
        await watched.until_watching()
    assert set(pauses) == {1e-9}


async def test_trouble_and_its_end_are_told(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    async with watching(tmp_path, pods={"p": pod("p")}) as watched:
        await watched.until_watching()
        watched.api.refusal = 500, "etcd is away"
        watched.api.break_watches()
        await logged(caplog, "etcd is away")
        num_asked = len(watched.api.asked)
        async with asyncio.timeout(10):
            while len(watched.api.asked) < num_asked + 3:
                await asyncio.sleep(0.005)
        watched.api.refusal = None
        await watched.until_watching()
    told = [record.getMessage() for record in caplog.records if "pods are" in record.getMessage()]
    assert told == ["pods are not watched, instances stay as they are: 500 etcd is away", "pods are watched again"]


async def logged(caplog, words):
    async with asyncio.timeout(10):
        while words not in caplog.text:
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("error", [pod_watch.ConfigException("Token file exists but empty."), TypeError("a defect")])
async def test_whatever_ends_a_watch_another_one_begins(tmp_path, caplog, error):
    async with watching(tmp_path, pods={"p": pod("p")}) as watched:
        await watched.until_watching()
        api = watched.watch._api
        ask, errors = api.list_namespaced_pod_without_preload_content, [error]

        async def once(*arguments, **options):
            if errors:
                raise errors.pop()
            return await ask(*arguments, **options)

        api.list_namespaced_pod_without_preload_content = once
        watched.api.break_watches()
        await watched.until_watching()
        watched.api.put(pod("d", "decode", "10.0.0.2"))
        await watched.until(P0, D0)
    assert str(error) in caplog.text


async def test_the_namespace_is_the_kubeconfigs_where_none_is_named(tmp_path):
    async with watching(tmp_path, PodSelection("app=kvferry"), pods={"p": pod("p")}) as watched:
        await watched.until(P0)
        assert watched.api.namespaces == {NAMESPACE}


async def test_an_instance_that_had_registered_first_stays_when_its_registration_ends(tmp_path):
    async with serving_api(pods={"p": pod("p")}) as api:
        watched = Watched(api, tmp_path)
        watched.pool.add(P0, Origin.REGISTERED, 15.0)
        task = asyncio.create_task(watched.watch.run())
        await watched.until_watching()
        watched.pool.remove(P0, Origin.REGISTERED)
        assert watched.pool.instances == ()
        api.break_watches()
        await watched.until(P0)
        task.cancel()
        await asyncio.wait([task])
        await watched.watch.aclose()


async def test_a_list_that_no_cluster_has_is_not_read_to_its_end(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(pod_watch, "MAX_LIST_BYTES", 100)
    async with serving_api(pods={"p": pod("p")}) as api:
        watched = Watched(api, tmp_path)
        await watched.watch.begin()
        assert watched.pool.instances == ()
        await watched.watch.aclose()
    assert "a list of more than 100 bytes" in caplog.text


async def test_a_beginning_that_is_broken_off_leaves_nothing_open(tmp_path):
    async with serving_api(is_silent=True) as api:
        watched = Watched(api, tmp_path)
        beginning = asyncio.create_task(watched.watch.begin())
        async with asyncio.timeout(10):
            while not api.asked:
                await asyncio.sleep(0.005)
        beginning.cancel()
        await asyncio.wait([beginning])
        assert watched.watch._api is None


async def test_in_a_pod_the_service_account_counts_and_its_namespace(tmp_path, monkeypatch):
    async with serving_api(pods={"p": pod("p")}) as api:
        own = tmp_path / "namespace"
        own.write_text("own\n")
        monkeypatch.setattr(pod_watch, "NAMESPACE_FILE", own)
        config = pod_watch.cluster_config
        monkeypatch.setattr(
            config, "load_incluster_config", lambda client_configuration: setattr(client_configuration, "host", api.url)
        )
        pool = InstancePool((), Metrics(), PolicySettings())
        watch = PodWatch(PodSelection("app=kvferry"), Section(pool, Origin.KUBERNETES))
        await watch.begin()
        assert (pool.instances, api.namespaces) == ((P0,), {"own"})
        await watch.aclose()


async def test_where_neither_a_pod_nor_a_kubeconfig_is_both_are_named(monkeypatch):
    def refuse(*_, **__):
        raise pod_watch.ConfigException("no token")

    async def refuse_too(*_, **__):
        raise pod_watch.ConfigException("no file")

    monkeypatch.setattr(pod_watch.cluster_config, "load_incluster_config", refuse)
    monkeypatch.setattr(pod_watch.cluster_config, "load_kube_config", refuse_too)
    section = Section(InstancePool((), Metrics(), PolicySettings()), Origin.KUBERNETES)
    with pytest.raises(ConfigurationError, match=r"as a pod: .*no token; by kubeconfig: .*no file"):
        await PodWatch(SELECTION, section).begin()


async def test_what_a_proxy_refuses_is_refused_in_its_words(tmp_path):
    async with serving_api(refusal=(403, "blocked by policy"), is_plain=True) as api:
        with pytest.raises(ConfigurationError, match="403 blocked by policy"):
            await Watched(api, tmp_path).watch.begin()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "a: [",
        json.dumps({"current-context": "h", "contexts": [{"name": "h", "token": "SECRET"}]}),
        json.dumps(
            {
                "current-context": "h",
                "clusters": [{"name": "h", "cluster": {"server": "https://h", "certificate-authority-data": "%"}}],
                "users": [{"name": "h", "user": {}}],
                "contexts": [{"name": "h", "context": {"cluster": "h", "user": "h"}}],
            }
        ),
    ],
    ids=["empty", "a list", "no YAML", "a token in the wrong place", "a certificate that is none"],
)
async def test_a_kubeconfig_that_is_none_is_refused_and_not_shown(tmp_path, text):
    path = tmp_path / "kubeconfig"
    path.write_text(text)
    section = Section(InstancePool((), Metrics(), PolicySettings()), Origin.KUBERNETES)
    with pytest.raises(ConfigurationError, match="there is no Kubernetes cluster to ask") as caught:
        await PodWatch(SELECTION, section, str(path)).begin()
    assert "SECRET" not in str(caught.value)


async def test_a_task_that_should_go_on_for_ever_and_does_not_makes_a_router_unready(tmp_path, monkeypatch, caplog):
    async def run(_):
        raise TypeError("a defect")

    monkeypatch.setattr(Prober, "run", run)
    async with cluster([prefill_engine()], [decode_engine()]) as router:
        await logged(caplog, "a task of the router has ended: it asks to be replaced")
        async with router.session.get(router.url + "/ready") as response:
            assert response.status == 503
    assert "TypeError: a defect" in caplog.text


def test_an_instance_that_has_left_in_another_way_is_taken_in_again():
    pool = InstancePool((), Metrics(), PolicySettings())
    section = Section(pool, Origin.KUBERNETES)
    pool.add(P0, Origin.REGISTERED, 15.0)
    section.set(frozenset({P0}))
    pool.remove(P0, Origin.REGISTERED)
    assert pool.instances == ()
    section.renew()
    assert pool.instances == (P0,)
    section.set(frozenset())
    assert pool.instances == ()


async def test_a_server_that_falls_silent_is_asked_again(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(pod_watch, "WATCH_S", 1)
    monkeypatch.setattr(pod_watch, "SLACK_S", -0.8)
    async with watching(tmp_path, pods={"p": pod("p")}) as watched:
        await watched.until_watching()
        await watched.until_watching()
        assert watched.pool.instances == (P0,)
    assert "instances stay as they are: TimeoutError" in caplog.text


async def test_what_the_api_refuses_at_first_is_refused_before_anything_starts(tmp_path):
    async with serving_api(token="secret") as api:
        watched = Watched(api, tmp_path)
        api.token = "another"
        with pytest.raises(ConfigurationError) as caught:
            await watched.watch.begin()
        assert "found: 401 Unauthorized" in " ".join(str(caught.value).split())
        api.refusal = 403, 'pods is forbidden: User "x" cannot list resource "pods"'
        with pytest.raises(ConfigurationError, match="needs get, list and watch of pods"):
            await watched.watch.begin()
        api.refusal = 400, "unable to parse requirement"
        with pytest.raises(ConfigurationError, match="unable to parse requirement"):
            await watched.watch.begin()


async def test_an_api_that_is_not_there_yet_is_waited_for(tmp_path, caplog):
    async with serving_api(pods={"p": pod("p")}) as api:
        api.refusal = 503, "starting"
        watched = Watched(api, tmp_path)
        await watched.watch.begin()
        assert "the Kubernetes API cannot be asked yet: 503 starting" in caplog.text
        api.refusal = None
        task = asyncio.create_task(watched.watch.run())
        await watched.until(P0)
        task.cancel()
        await asyncio.wait([task])
        await watched.watch.aclose()


async def test_without_a_cluster_a_router_does_not_begin(tmp_path):
    config = RouterConfig((), (), pods=SELECTION)
    assert config.instances_may_join
    section = Section(InstancePool((), Metrics(), PolicySettings()), Origin.KUBERNETES)
    with pytest.raises(ConfigurationError, match="there is no Kubernetes cluster to ask"):
        await PodWatch(SELECTION, section, str(tmp_path / "nothing")).begin()


async def test_a_router_serves_with_the_pods_that_there_are(tmp_path, monkeypatch):
    prefill, decode = prefill_engine(), decode_engine()
    for engine in (prefill, decode):
        await engine.start()
    async with serving_api() as api:
        for name, engine in (("prefill", prefill), ("decode", decode)):
            api.put(pod(name, name, "127.0.0.1", urlsplit(engine.url).port))
        kubeconfig = api.kubeconfig(tmp_path / "kubeconfig")

        async def load(_, settings):
            await pod_watch.cluster_config.load_kube_config(kubeconfig, client_configuration=settings)

        monkeypatch.setattr(PodWatch, "_load", load)
        async with cluster([], [], pods=SELECTION) as router:
            await router.app.begin()
            assert (await router.complete()).headers["x-kvferry-path"] == "disaggregated"
            told = (await router.members())["members"]
            assert {(one["url"], one["origin"]) for one in told} == {
                (prefill.url, "Kubernetes"),
                (decode.url, "Kubernetes"),
            }
            api.put(pod("prefill", "prefill", "127.0.0.1", urlsplit(prefill.url).port, deletionTimestamp="now"))
            await router.until_health_changes()
            assert (await router.complete()).headers["x-kvferry-path"] == "decode-only"
            # What came at the start was asked for once.
            assert len([query for query in api.asked if "watch" not in query]) == 1
    for engine in (prefill, decode):
        await engine.stop()
