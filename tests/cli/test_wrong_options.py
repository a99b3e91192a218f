"""What is wrong with options is told before anything is started, and before anybody takes it for ready."""

import asyncio
import os

import pytest
from typer.testing import CliRunner

from kvferry.cli.bench import serve as bench
from kvferry.cli.child_processes import Child
from kvferry.cli.main import app
from kvferry.cli.models import resolve
from kvferry.errors import ConfigurationError


def told(*arguments):
    result = CliRunner().invoke(app, [str(each) for each in arguments])
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    return " ".join(result.stderr.split())


@pytest.mark.parametrize("output", [(), ("--json",)])
def test_a_router_does_not_say_that_it_routes_before_it_has_read_its_members(tmp_path, output):
    words = told("route", "--port", 0, "--members-file", tmp_path / "none.json", *output)
    assert "routing" not in words
    assert "none.json" in words


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--engine-id", ""), "invalid engine id found: ''"),
        (("--engine-id", "a b"), "invalid engine id found: 'a b'"),
        (("--engine-id", "x" * 201), "1 to 200 characters"),
        (("--heartbeat", "10", "--lease-timeout", "19"), "at least twice --heartbeat, which is 10 s"),
        (("--role", "decode"), "--register URL as well"),
        (("--strategy", "foo"), "unknown strategy"),
        (("--simulated-step", "foo"), "unknown kind of step cost"),
        (("--failure-policy", "foo"), "'foo' is not one of"),
        (("--start-timeout", "900"), "--engine vllm or sglang"),
        (("--register", "http://127.0.0.1:abc", "--role", "decode"), "invalid URL"),
        (("--register", "http://", "--role", "decode"), "invalid URL"),
        (("--allow-credentials",), "--allowed-origins as well"),
        (("--allowed-methods", "GET"), "--allowed-origins as well"),
    ],
)
def test_an_engine_is_not_loaded_for_options_that_make_no_sense(monkeypatch, arguments, words):
    monkeypatch.setattr("kvferry.cli.models.resolve", lambda model: pytest.fail("loaded"))
    assert words in told("serve", *arguments).replace("│ ", "")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--kubernetes-port", "8200"), "--kubernetes-selector as well"),
        (("--kubernetes-selector", "app=x", "--kubernetes-namespace", "No"), "invalid --kubernetes-namespace"),
    ],
)
def test_a_router_does_not_look_for_pods_that_no_cluster_has(arguments, words):
    assert words in told("route", "--port", 0, "--decode", "http://127.0.0.1:1", *arguments)


def test_logs_that_have_no_place_are_one_clear_message(tmp_path):
    (tmp_path / "file").touch()
    assert "cannot create the log folder" in told("up", "--model", tmp_path, "--log-dir", tmp_path / "file")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("bench", "serve", "--trace", "t.jsonl", "--requests", "5"), "no effect beside --trace found: --requests"),
        (("bench", "serve", "--sweep", "1,2", "--attainment", "0.5"), "no effect without --slo"),
        (("bench", "serve", "--timeout", "inf"), "'--timeout'"),
        (("bench", "serve", "--header", "X T: a"), "invalid --header"),
        (("bench", "accuracy", "--url", "http://a:1", "--against", "http://a:1/v1/"), "are the same server"),
        (("doctor", "--peer", ""), "--peer is empty"),
        (("doctor", "--vllm-args", " "), "--vllm-args is empty"),
        (("doctor", "--vllm-args", "--x", "--peer", "a:1"), "no effect beside --vllm-args found: --peer"),
        (("plan", "--model", "tiny", "--prefill", "tp=2,run=7", "--decode", "tp=1"), "run= has no effect"),
    ],
)
def test_what_would_have_no_effect_is_refused(arguments, words):
    assert words in told(*arguments).replace("│ ", "")


@pytest.mark.parametrize(
    "command",
    [("bench", "serve", "--plot"), ("plan", "--model", "tiny", "--prefill", "tp=1", "--decode", "tp=2", "--html")],
)
def test_a_page_that_cannot_be_written_is_refused_before_anything_is_measured(tmp_path, command):
    (tmp_path / "page.html").mkdir()
    assert "the page cannot be written" in told(*command, tmp_path / "page.html")
    long = "x" * 300
    assert "File name too long" in told(*command, tmp_path / f"{long}.html")
    assert "the folder does not exist" in told(*command, tmp_path / long / "page.html")


def test_a_benchmark_that_is_interrupted_says_that_nothing_is_reported(monkeypatch):
    def interrupt(work):
        work.close()
        raise KeyboardInterrupt

    said = []
    monkeypatch.setattr(asyncio, "run", interrupt)
    monkeypatch.setattr(bench.console, "say", said.append)
    CliRunner().invoke(app, ["bench", "serve", "--requests", "1"])
    assert said == ["interrupted: partial results are not reported"]


def test_a_token_that_no_engine_would_show_is_an_error():
    words = told("route", "--port", 0, "--decode", "http://127.0.0.1:1", "--token-file", "kvferry.token")
    assert "--token-file needs --accept-registrations" in words


@pytest.mark.parametrize("policy", ["os:getcwd", "os:nothing"])
def test_a_policy_that_takes_no_question_is_none(policy):
    words = told("route", "--port", 0, "--decode", "http://127.0.0.1:1", "--policy", policy)
    assert policy in words


def test_a_number_of_thousands_of_digits_is_one_clear_message():
    words = told("route", "--decode", "http://127.0.0.1:1", "--port", 0, "--skip-prefill-below", "9" * 5000)
    assert "a number of at most 12 digits, or auto" in words


def test_an_address_is_shown_as_it_is():
    assert "fd00:a:b:100::1:0" in told(
        "route", "--decode", "http://127.0.0.1:1", "--host", "fd00:a:b:100::1", "--port", 0
    )


@pytest.mark.parametrize("model", ["~nosuch/folder", "./" + "x" * 300])
def test_a_folder_that_cannot_be_is_one_clear_message(model):
    assert "no such folder" in told("serve", "--model", model)


def test_a_home_folder_that_the_shell_has_left_as_it_is_is_found(tmp_path, monkeypatch):
    (tmp_path / "model").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve("~/model") == (str(tmp_path / "model"), "model")


def test_without_a_home_folder_it_is_said_what_to_set(monkeypatch):
    for name in ("HOME", "XDG_CACHE_HOME", "KVFERRY_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 987_654)
    assert "set KVFERRY_CACHE to a folder that can be written" in told("serve")
    result = CliRunner().invoke(app, ["doctor", "--json"])
    assert "set KVFERRY_CACHE to a folder that can be written" in result.stdout


def test_a_peer_that_is_no_address_is_one_clear_message():
    assert "invalid --peer address" in told("doctor", "--peer", "[::1")


def test_a_log_that_cannot_be_written_is_one_clear_message(tmp_path):
    (tmp_path / "engine.log").mkdir()
    with pytest.raises(ConfigurationError, match="cannot write a log"):
        Child("engine", ("serve",), tmp_path / "engine.log")
