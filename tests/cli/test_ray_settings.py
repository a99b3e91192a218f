"""What a fleet on Ray may be told, what no cluster can hold, and how many engines a load needs. No Ray is needed."""

from __future__ import annotations

import secrets
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from starlette.testclient import TestClient
from typer.testing import CliRunner

from kvferry.cli import main
from kvferry.cli.options import TransferOptions
from kvferry.cli.ray.placement import check_placement
from kvferry.cli.ray.router import Router
from kvferry.cli.ray.scaling import METRIC, LoadPolicy
from kvferry.cli.ray.settings import TARGETS, RaySettings, settings_from
from kvferry.cli.up import job
from kvferry.cli.up.command import PlaceOptions, UpOptions
from kvferry.cli.up.ray_settings import settings_of
from kvferry.errors import ConfigurationError
from kvferry.http.registration import Side

NODE = {"CPU": 8.0, "GPU": 2.0, "memory": 1e11, "node:10.0.0.1": 1.0, "object_store_memory": 1e10}
FILE = Path(__file__).parents[2] / "deploy/ray/kvferry.yaml"
GPU = {"resources": {"CPU": 1, "GPU": 1}}


def test_words_of_a_role_follow_those_of_all_and_the_servers_own_come_last():
    fleet = {
        "model": "org/m",
        "engine": "vllm",
        "drain_timeout_s": 90,
        "extra_args": ["--transport", "nixl"],
        "engine_args": ["--seed", "1"],
        "decode": {"extra_args": ["--block-tokens", "32"], "engine_args": ["--tensor-parallel-size", "2"]},
    }
    words = " ".join(settings_from(fleet).serve_words(Side.DECODE))
    first = "--model org/m --engine vllm --drain-timeout 90 --transport nixl --block-tokens 32"
    assert words == f"{first} -- --seed 1 --tensor-parallel-size 2"
    assert settings_from(fleet).serve_words(Side.PREFILL)[-2:] == ("--seed", "1")


def test_a_server_of_sglang_is_told_its_role():
    settings = settings_from({"engine": "sglang"})
    assert {side: settings.serve_words(side)[-2:] for side in Side} == {side: ("--role", str(side)) for side in Side}


def test_the_file_for_serve_has_settings_that_are_known():
    """And says of each what it is by itself, but for the numbers of engines."""
    (application,) = yaml.safe_load(FILE.read_text())["applications"]
    assert application["import_path"] == "kvferry.ray:app"
    settings = settings_from(application["args"])
    assert {side: role.target_load for side, role in settings.roles.items()} == TARGETS
    assert set(application["args"]) == set(RaySettings.__struct_fields__) - {"start_timeout_s", "router_resources"}


@pytest.mark.parametrize("root", ["", "/kv", "/kv/"])
@pytest.mark.parametrize(
    ("method", "path"), [("POST", "/v1/completions"), ("GET", "/v1/models"), ("POST", "/tokenize")]
)
def test_a_router_below_another_path_asks_for_a_key(monkeypatch, tmp_path, root, method, path):
    """Serve passes on the whole path."""
    monkeypatch.setenv("KVFERRY_API_KEY", "secret")
    token = tmp_path / "token"
    token.touch(0o600)
    token.write_text(secrets.token_hex(32))
    words = ("--decode", "http://127.0.0.1:9", "--allowed-origins", "https://chat.example")
    app = Router(words, str(token)).__serve_build_asgi_app__()
    with TestClient(app, root_path=root) as client:
        asked = {"method": method, "url": root.rstrip("/") + path, "json": {"model": "tiny", "prompt": "a"}}
        origin = {"origin": "https://chat.example"}
        refused = client.request(**asked, headers=origin)
        assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
        assert refused.headers["access-control-allow-origin"] == origin["origin"]
        let_in = client.request(**asked, headers={"authorization": "Bearer secret"})
        assert let_in.status_code == 503


@pytest.mark.parametrize(
    "settings",
    [
        {"extra_args": ["--api-key", "sk-secret", "--nope"]},
        {"extra_args": ["--", "--api-key", "sk-secret"]},
        {"router_args": ["--engine-api-key", "sk-secret", "--max-requests", "many"]},
        {"router_args": ["--", "--engine-api-key=sk-secret"]},
    ],
)
def test_no_key_stands_in_an_error(settings):
    with pytest.raises(ConfigurationError) as caught:
        settings_from(settings)
    assert "-key" in str(caught.value)
    assert "sk-secret" not in str(caught.value)


def test_origins_that_no_page_could_use_are_refused():
    with pytest.raises(ConfigurationError, match="--allowed-origins"):
        settings_from({"router_args": ["--allow-credentials"]})


def test_serve_run_gives_texts_for_numbers():
    assert settings_from({"drain_timeout_s": "12", "nodes_may_join": "true"}).drain_timeout_s == 12


@pytest.mark.parametrize(
    ("arguments", "what", "found"),
    [
        ({"mdoel": "tiny"}, "invalid settings", "mdoel"),
        ({"encode": {}}, "invalid settings", "encode"),
        ({"prefill": {"min_replicas": 0}}, "so many prefill engines", "min_replicas 0, max_replicas 1"),
        (
            {"decode": {"min_replicas": 3, "max_replicas": 2}},
            "so many decode engines",
            "min_replicas 3, max_replicas 2",
        ),
        ({"decode": {"target_load": -1}}, "out of range", "decode.target_load: -1"),
        ({"prefill": {"look_back_s": float("nan")}}, "out of range", "prefill.look_back_s: nan"),
        ({"prefill": {"resources": {}}}, "no resources", "{}"),
        ({"prefill": {"resources": {"GPU": 0}}}, "cannot give", "GPU: 0"),
        ({"decode": {"resources": {"GPU": 1.5}}}, "cannot give", "GPU: 1.5"),
        ({"engine": "tensorrt"}, "unknown engine", "tensorrt"),
        ({"extra_args": ["--transport", "pigeon"]}, "unknown transport", "pigeon"),
        ({"router_args": ["--prefill-fallback", "wait"]}, "invalid --prefill-fallback", "wait"),
        ({"extra_args": ["--nope"]}, "kvferry serve does not take", "--nope"),
        ({"extra_args": ["--port", "1"]}, "cannot stand in extra_args", "--port"),
        ({"extra_args": ["--api-key", "secret"]}, "cannot stand in extra_args", "--api-key"),
        ({"decode": {"extra_args": ["--", "--seed", "1"]}}, "cannot stand in extra_args", "--seed 1"),
        ({"router_args": ["--otel"]}, "cannot stand in router_args", "--otel"),
        ({"router_args": ["--max-requests", "many"]}, "kvferry route does not take", "many"),
        ({"drain_timeout_s": -5}, "out of range", "drain_timeout_s: -5"),
        ({"drain_timeout_s": float("inf")}, "out of range", "drain_timeout_s: inf"),
        ({"drain_timeout_s": float("nan")}, "out of range", "drain_timeout_s: nan"),
        ({"start_timeout_s": 0}, "out of range", "start_timeout_s: 0"),
        ({"start_timeout_s": "nan"}, "out of range", "start_timeout_s: nan"),
        ({"start_timeout_s": float("inf")}, "out of range", "start_timeout_s: inf"),
        ({"model": ""}, "no model", "empty"),
        ({"prefill": {"resources": {"": 1}}}, "a prefill engine has a resource without a name", "'': 1"),
        ({"router_resources": {" ": 1}}, "the router has a resource without a name", "' ': 1"),
        ({"extra_args": ["--"]}, "cannot stand in extra_args", "--"),
        ({"router_args": ["--"]}, "cannot stand in router_args", "--"),
        ({"extra_args": ["--help"]}, "kvferry serve does not take", "--help"),
        ({"router_args": ["--help"]}, "kvferry route does not take", "--help"),
        ({"extra_args": ["--heartbeat", "nan"]}, "not a number|does not take", "nan"),
        ({"extra_args": ["--lease-timeout", "1"]}, "--lease-timeout is too short", "1 s"),
        ({"engine_args": ["--seed", "1"]}, "for another engine's server", "--seed"),
        ({"decode": {"engine_args": ["--api-key", "secret"]}}, "for another engine's server", "--api-key"),
        ({"engine": "vllm", "engine_args": ["--api-key", "secret"]}, "does not pass this option on", "--api-key"),
        ({"engine": "vllm", "engine_args": ["--api_key=secret"]}, "does not pass this option on", "--api-key"),
        ({"engine": "vllm", "engine_args": ["--port", "8"]}, "does not pass this option on", "--port"),
        ({"engine": "vllm", "prefill": {"engine_args": ["--kv_transfer_config={}"]}}, "does not pass this", "--kv-tr"),
        ({"engine": "vllm", "engine_args": ["--help"]}, "does not pass this option on", "--help"),
        ({"engine": "vllm", "engine_args": ["--seed", "1", "--"]}, "cannot stand in engine_args", "--"),
        ({"engine": "vllm", "extra_args": ["--device", "cuda"]}, "does not apply to vLLM", "--device"),
        ({"engine": "sglang", "extra_args": ["--layer-wise"]}, "do not move layer by layer", "--layer-wise"),
        ({"engine": "sglang", "engine_args": ["--admin-api-key", "secret"]}, "does not pass", "--admin-api-key"),
    ],
)
def test_what_makes_no_sense_is_refused_without_a_cluster(arguments, what, found):
    with pytest.raises(ConfigurationError, match=what) as refused:
        settings_from(arguments)
    assert found in refused.value.found
    assert "secret" not in str(refused.value)


def test_other_engines_are_not_needed_where_the_application_is_built():
    for engine in ("vllm", "sglang"):
        fleet = {"engine": engine, "extra_args": ["--transport", "nixl"], "engine_args": ["--seed", "1"]}
        assert settings_from(fleet).engine == engine


def test_engines_and_router_that_fit_are_let_through():
    check_placement(settings_from({"prefill": GPU, "decode": GPU}), [NODE])


@pytest.mark.parametrize(
    ("arguments", "nodes", "found", "expected"),
    [
        ({"prefill": {"resources": {"GPU": 4}}}, [NODE, NODE], "CPU: 8, GPU: 2, memory: 1e+11", "a node with GPU: 4"),
        ({"prefill": GPU, "decode": {**GPU, "min_replicas": 2, "max_replicas": 2}}, [NODE], "GPU: 2", "CPU: 4, GPU: 3"),
        ({"router_resources": {"head": 1}}, [NODE], "GPU: 2", "a node with head: 1"),
        ({}, [], "no node", "a node with CPU: 1"),
    ],
)
def test_what_does_not_fit_is_refused_with_what_there_is(arguments, nodes, found, expected):
    with pytest.raises(ConfigurationError) as refused:
        check_placement(settings_from(arguments), nodes)
    assert found in refused.value.found
    assert "node:" not in refused.value.found
    assert refused.value.expected == expected


@pytest.mark.parametrize(("loads", "wanted"), [([0.0, 0.0], 0), ([30.0, 50.0], 2), ([90.0], 2.25)])
def test_the_policy_wants_engines_for_the_load(loads, wanted):
    context = SimpleNamespace(aggregated_metrics={METRIC: dict(enumerate(loads))}, target_num_replicas=5)
    assert LoadPolicy(40.0)(context) == (wanted, {})


@pytest.mark.parametrize("metrics", [None, {}, {METRIC: {}}])
def test_without_a_report_the_policy_changes_nothing(metrics):
    assert LoadPolicy(40.0)(SimpleNamespace(aggregated_metrics=metrics, target_num_replicas=5)) == (5, {})


def test_up_on_ray_names_the_model_and_not_the_folder_that_it_is_here():
    place = PlaceOptions("ray", ["GPU=1", "CPU=2"], "token")
    options = UpOptions("tiny", prefill=2, transfer=TransferOptions(transport="tcp"), place=place)
    fleet = job._fleet_options(options, "folder", "tiny")
    settings = settings_of(options, fleet, job._serve_words(options, "tiny"))
    assert settings.prefill.resources == {"GPU": 1.0, "CPU": 2.0}
    assert (settings.prefill.min_replicas, settings.prefill.max_replicas, settings.decode.min_replicas) == (2, 2, 1)
    assert settings.token_file == "token"
    words = " ".join(settings.serve_words(Side.DECODE))
    assert words.startswith("--model tiny --engine transformers --drain-timeout 10 --served-name tiny --transport tcp")
    assert words.endswith("--block-tokens 16 --num-blocks 1024")


@pytest.mark.parametrize("text", ["GPU", "GPU=one", "=1", " =1"])
def test_resources_of_up_are_names_and_numbers(text):
    options = UpOptions(place=PlaceOptions("ray", [text]))
    with pytest.raises(ConfigurationError, match="invalid --resources"):
        settings_of(options, job._fleet_options(options, "folder", "tiny"), [])


def test_without_ray_up_says_what_to_install(monkeypatch):
    for name in [name for name in sys.modules if name == "ray" or name.startswith(("ray.", "kvferry.cli.ray."))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "ray", None)
    found = CliRunner().invoke(main.app, ["up", "--on", "ray", "--once", "The ferry"])
    assert found.exit_code == 2
    assert "the Python package ray is not installed: pip install 'kvferry[ray]'" in found.output


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["--on", "mars"], "unknown place for a fleet"),
        (["--resources", "GPU=1"], "no effect without --on ray"),
        (["--token-file", "token"], "no effect without --on ray"),
        (["--on", "ray", "--log-dir", "logs"], "no effect beside --on ray"),
    ],
)
def test_options_of_ray_have_an_effect_on_ray_only(words, what):
    found = CliRunner().invoke(main.app, ["up", *words])
    assert found.exit_code == 2
    assert what in " ".join(found.output.split())
