"""`kvferry serve --engine vllm`, with a stand-in for vLLM. What is true of every engine's process is tested here."""

import inspect
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
from engine_stand_in import DEADLINE_S, SERVER, after, seen, starting
from gone_processes import assert_gone
from typer.testing import CliRunner

from kvferry.agent.config import STAGING_BYTES
from kvferry.cli import main
from kvferry.cli.options import AccessOptions, TransferOptions
from kvferry.cli.serve.command import ServeOptions
from kvferry.cli.serve.vllm import vllm_command, vllm_environment
from kvferry.connectors.vllm_middleware import FerryMiddleware, middleware
from kvferry.errors import ConfigurationError

OPTIONS = ServeOptions(
    model="m",
    served_name="name",
    engine_id="e-1",
    transfer=TransferOptions("shm"),
    block_tokens=0,
    staging_mib=0,
    lease_timeout=0.0,
    drain_timeout=0.0,
)


def options(**changed) -> ServeOptions:
    return replace(OPTIONS, **changed)


def test_vllm_gets_its_key_through_the_environment_and_not_on_the_command_line():
    given = options(http_access=AccessOptions(["first-key"]))
    assert vllm_environment(given)["VLLM_API_KEY"] == "first-key"
    assert "first-key" not in " ".join(vllm_command(given, 8123)) + repr(given)
    with pytest.raises(ConfigurationError, match="one --api-key"):
        vllm_environment(options(http_access=AccessOptions(["first-key", "second-key"])))


def test_the_command_line_names_our_connector():
    command = vllm_command(options(transfer=TransferOptions("tcp"), transfer_port=7000, failure_policy="fail"), 8123)
    assert command[1:5] == ["-m", "vllm.entrypoints.cli.main", "serve", "m"]
    assert (after(command, "--port"), after(command, "--served-model-name")) == ("8123", "name")
    assert json.loads(after(command, "--kv-transfer-config")) == {
        "kv_connector": "FerryConnector",
        "kv_connector_module_path": "kvferry.connectors.vllm",
        "kv_role": "kv_both",
        "engine_id": "e-1",
        "kv_load_failure_policy": "fail",
        "kv_connector_extra_config": {"transport": "tcp", "port": 7000},
    }


def test_our_router_finds_the_paths_that_it_knows():
    command = vllm_command(OPTIONS, 1)
    assert (
        after(command, "--middleware") == f"{FerryMiddleware.__module__.rpartition('.')[0]}.{FerryMiddleware.__name__}"
    )
    module, _, name = after(command, "--worker-extension-cls").rpartition(".")
    assert module == "kvferry.connectors.vllm.extension"
    # It needs vLLM to be imported.
    source = Path(middleware.__file__).parents[1] / "vllm" / "extension.py"
    assert f"class {name}:" in source.read_text()


def test_leases_and_draining_are_vllms_own_unless_chosen():
    assert "--shutdown-timeout" not in vllm_command(OPTIONS, 1)
    command = vllm_command(options(lease_timeout=12.5, drain_timeout=20.5), 1)
    assert after(command, "--shutdown-timeout") == "21"
    assert json.loads(after(command, "--kv-transfer-config"))["kv_connector_extra_config"]["kv_lease_duration"] == 12.5


def test_the_command_and_the_agent_have_one_default_of_staging_memory():
    assert inspect.signature(main.serve).parameters["staging_mib"].default << 20 == STAGING_BYTES


def chosen(given, monkeypatch, tmp_path) -> ServeOptions:
    """What `kvferry serve --engine vllm` makes of these arguments."""
    seen = []
    monkeypatch.setattr("kvferry.cli.engine_choice.check_installed", lambda engine: None)
    monkeypatch.setattr("kvferry.cli.serve.vllm.serve_vllm", lambda options: seen.append(options) or 0)
    result = CliRunner().invoke(main.app, ["serve", "--engine", "vllm", "--model", str(tmp_path), *given])
    assert result.exit_code == 0, result.output
    (only,) = seen
    return only


@pytest.mark.parametrize(("given", "staging_bytes"), [([], None), (["--staging-mib", "64"], 64 << 20)])
def test_staging_memory_is_the_connectors_own_unless_chosen(given, staging_bytes, monkeypatch, tmp_path):
    command = vllm_command(chosen(given, monkeypatch, tmp_path), 1)
    transfer = json.loads(after(command, "--kv-transfer-config"))
    assert transfer["kv_connector_extra_config"].get("staging_bytes") == staging_bytes


@pytest.mark.parametrize(
    ("given", "drain_s"), [([], 30.0), (["--as-child"], 0.0), (["--as-child", "--drain-timeout", "5"], 5.0)]
)
def test_vllm_may_drain_unless_whoever_started_us_is_in_a_hurry(given, drain_s, monkeypatch, tmp_path):
    assert chosen(given, monkeypatch, tmp_path).drain_timeout == drain_s


@pytest.mark.parametrize(
    ("given", "served"),
    [
        ([], ""),
        (["--served-name", "ours"], "ours"),
        (["--served-name", "ours", "--", "--served-model-name", "first", "second"], "first"),
        (["--", "--served_model_name=theirs"], "theirs"),
    ],
)
def test_a_model_is_called_what_vllm_calls_it(given, served, monkeypatch, tmp_path):
    assert chosen(given, monkeypatch, tmp_path).served_name == (served or tmp_path.name)


def test_the_buffer_device_is_vllms_own_key_and_its_own_unless_chosen():
    told = [
        json.loads(after(vllm_command(options(transfer=transfer), 1), "--kv-transfer-config")).get("kv_buffer_device")
        for transfer in (TransferOptions(), TransferOptions(buffer_device="cpu"))
    ]
    assert told == [None, "cpu"]


def test_staging_memory_may_lie_on_the_device():
    command = vllm_command(options(transfer=TransferOptions(staging_memory="device")), 1)
    assert transfer_of(command)["staging_memory"] == "device"


@pytest.mark.parametrize("option", ["--device", "--num-blocks", "--max-batch-tokens", "--heartbeat"])
def test_what_vllm_has_no_place_for_is_not_passed_over(option, monkeypatch):
    monkeypatch.setattr("kvferry.cli.engine_choice.check_installed", lambda engine: None)
    result = CliRunner().invoke(main.app, ["serve", "--engine", "vllm", option, "7"])
    assert result.exit_code == 2
    assert option in result.output


def test_the_block_size_is_vllms_own_unless_chosen_and_arguments_come_last():
    assert "--block-size" not in vllm_command(OPTIONS, 1)
    command = vllm_command(options(block_tokens=32, arguments=("--block-size", "64")), 1)
    assert after(command, "--block-size") == "32"
    assert command[-2:] == ["--block-size", "64"]


def transfer_of(command: list[str]) -> dict:
    return json.loads(after(command, "--kv-transfer-config"))["kv_connector_extra_config"]


def test_the_token_is_named_by_its_file_and_a_host_only_when_it_is_another():
    assert {"host", "token_file"}.isdisjoint(transfer_of(vllm_command(OPTIONS, 1)))
    command = vllm_command(options(transfer_host="10.0.0.5", token_file="/run/secrets/kvferry"), 1)
    assert transfer_of(command) | {"host": "10.0.0.5", "token_file": "/run/secrets/kvferry"} == transfer_of(command)


@pytest.mark.parametrize(("direction", "extra"), [("auto", None), ("pull", "pull"), ("push", "push")])
def test_who_moves_a_cache_is_said_only_when_it_is_chosen(direction, extra):
    chosen = options(transfer=TransferOptions(transfer_direction=direction))
    assert transfer_of(vllm_command(chosen, 1)).get("transfer_direction") == extra


@pytest.mark.parametrize("is_wanted", [True, False])
def test_layers_leave_one_by_one_where_that_is_wanted(is_wanted):
    assert transfer_of(vllm_command(options(layer_wise=is_wanted), 1)).get("layer_wise", False) is is_wanted


def test_a_direction_that_does_not_exist_is_refused():
    result = CliRunner().invoke(main.app, ["serve", "--engine", "vllm", "--transfer-direction", "sideways"])
    assert result.exit_code == 2
    assert "sideways" in result.output


@pytest.fixture
def start(tmp_path):
    """Start the real command with the stand-in on the path; returns the process."""
    with starting(tmp_path, "vllm", {"vllm.entrypoints.cli.main": SERVER}) as start:
        yield start


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_announces_itself_and_leaves_nothing_behind_when_told_to_end(start, tmp_path, number):
    process = start("--engine-id", "left", "--", "--max-model-len", "64")
    ready = json.loads(process.stdout.readline())
    assert (ready["event"], ready["engine_id"], ready["model"]) == ("ready", "left", tmp_path.name)
    arguments, pids = seen(tmp_path)
    assert arguments[-2:] == ["--max-model-len", "64"]
    assert ready["url"] == f"http://127.0.0.1:{after(arguments, '--port')}"
    process.send_signal(number)
    assert process.wait(DEADLINE_S) == 0
    assert_gone(*pids)


@pytest.mark.parametrize(("host", "address"), [("[::1]", "::1"), ("localhost", "127.0.0.1")])
def test_vllm_is_told_the_address_that_is_held_for_it(start, tmp_path, host, address):
    process = start("--host", host)
    url = json.loads(process.stdout.readline())["url"]
    arguments, _ = seen(tmp_path)
    assert after(arguments, "--host") == address
    assert url == f"http://{f'[{address}]' if ':' in address else address}:{after(arguments, '--port')}"
    process.send_signal(signal.SIGTERM)
    assert process.wait(DEADLINE_S) == 0


def test_vllm_is_in_our_session_and_in_a_process_group_of_its_own(start, tmp_path):
    """Linux shares its cores among sessions first; and what we end must not be our own group."""
    process = start()
    process.stdout.readline()
    first, helper = seen(tmp_path)[1]
    assert os.getsid(first) == os.getsid(helper) == os.getsid(process.pid)
    assert os.getpgid(first) == os.getpgid(helper) == first
    process.send_signal(signal.SIGTERM)
    assert process.wait(DEADLINE_S) == 0


def test_as_a_child_it_ends_when_its_parent_is_gone(start, tmp_path):
    process = start("--as-child")
    process.stdout.readline()
    process.stdin.close()
    assert process.wait(DEADLINE_S) == 0
    assert_gone(*seen(tmp_path)[1])


# Without the seconds that vLLM has in any case.
NO_GRACE = (
    "from kvferry.cli import main; from kvferry.cli.serve import engine_process as e; e.STOP_S = 0.0; main.main()"
)


def test_vllm_has_its_time_to_drain_before_it_is_killed(start, tmp_path):
    process = start("--drain-timeout", str(DEADLINE_S), program=("-c", NO_GRACE))
    process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    assert process.wait(DEADLINE_S) == 0
    assert (tmp_path / "drained").exists()
    assert_gone(*seen(tmp_path)[1])


@pytest.mark.parametrize("numbers", [(signal.SIGINT,), (signal.SIGTERM, signal.SIGTERM)])
def test_nobody_has_to_wait_for_what_is_open(start, tmp_path, numbers):
    """The stand-in would finish its requests for an hour."""
    process = start("--drain-timeout", "3600", "--", "--stubborn", program=("-c", NO_GRACE))
    process.stdout.readline()
    *first, last = numbers
    for number in first:
        process.send_signal(number)
        next(line for line in process.stderr if b"still answering" in line)
    process.send_signal(last)
    assert process.wait(DEADLINE_S) == 0
    assert_gone(*seen(tmp_path)[1])


def test_vllm_does_not_outlive_a_process_that_is_killed(start, tmp_path):
    """Whoever starts it again wants its port and its device, which vLLM's own child processes hold."""
    process = start()
    process.stdout.readline()
    process.kill()
    assert_gone(*seen(tmp_path)[1])


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("--port=8301", "kvferry's own --port"),
        ("--hos=0.0.0.0", "kvferry's own --host"),
        ("--kv_transfer_config={}", "start vllm serve yourself"),
        ("--kv-transfer-config.kv_connector=NixlConnector", "start vllm serve yourself"),
        ("--ssl-certfile", "a proxy that ends TLS"),
    ],
)
def test_what_kvferry_tells_vllm_itself_is_not_passed_on(given, expected, start):
    _, words = start("--", given).communicate(timeout=DEADLINE_S)
    assert "does not pass this option on" in words.decode()
    assert expected in " ".join(words.decode().split())


def test_vllms_own_end_is_ours(start, tmp_path):
    process = start()
    url = json.loads(process.stdout.readline())["url"]
    subprocess.run([sys.executable, "-c", f"import urllib.request as r; r.urlopen('{url}/die')"], check=False)
    assert process.wait(DEADLINE_S) == 3
    assert_gone(*seen(tmp_path)[1])


def test_an_early_end_is_an_error_with_a_hint(start):
    process = start("--", "--fail")
    output, words = process.communicate(timeout=DEADLINE_S)
    assert (process.returncode, output) == (2, b"")
    assert b"no such model" in words
    assert b"vLLM has exited" in words
    assert b"exit code 1" in words


def test_nobody_else_can_have_the_port_while_vllm_starts(start, tmp_path):
    process = start()
    process.stdout.readline()
    assert (tmp_path / "held").exists()
    process.send_signal(signal.SIGTERM)
    assert process.wait(DEADLINE_S) == 0


def test_whoever_answers_at_a_taken_port_is_not_taken_for_vllm(start, tmp_path):
    engine = start()
    url = json.loads(engine.stdout.readline())["url"]
    (tmp_path / "seen.json").unlink()
    process = start("--port", url.rpartition(":")[2])
    output, words = process.communicate(timeout=DEADLINE_S)
    assert (process.returncode, output) == (2, b"")
    assert b"cannot listen on" in words
    assert not (tmp_path / "seen.json").exists()
    engine.send_signal(signal.SIGTERM)
    assert engine.wait(DEADLINE_S) == 0


@pytest.mark.parametrize("command", ["serve", "up"])
@pytest.mark.parametrize(("engine", "name"), [("vllm", "vLLM"), ("sglang", "SGLang")])
@pytest.mark.parametrize("found", [None, ModuleSpec("a folder of that name", None)])
def test_without_the_engine_it_says_where_to_install_what(monkeypatch, tmp_path, command, engine, name, found):
    monkeypatch.setattr("kvferry.cli.engine_choice.find_spec", lambda name: found)
    result = CliRunner().invoke(main.app, [command, "--engine", engine, "--model", str(tmp_path)])
    assert result.exit_code == 2
    assert f"{name} is not installed here" in result.stderr


def test_arguments_for_an_engine_that_takes_none_are_refused(tmp_path):
    result = CliRunner().invoke(main.app, ["serve", "--model", str(tmp_path), "--", "--max-model-len", "64"])
    assert result.exit_code == 2
    assert "unexpected arguments" in result.stderr
    assert "hint" not in result.stderr


def test_a_model_without_its_option_is_guessed():
    result = CliRunner().invoke(main.app, ["serve", "some/model"])
    assert result.exit_code == 2
    assert "--model some/model" in result.stderr
    result = CliRunner().invoke(main.app, ["up", "--once", "--port", "20001"])
    assert result.exit_code == 2
    assert "hint" not in result.stderr


@pytest.mark.parametrize("command", ["serve", "up"])
def test_an_unknown_engine_is_refused(command, tmp_path):
    result = CliRunner().invoke(main.app, [command, "--model", str(tmp_path), "--engine", "abacus"])
    assert result.exit_code == 2
    assert "unknown engine" in result.stderr
