"""`kvferry serve --engine sglang`, with a stand-in for SGLang. `test_serve_vllm` has what is true of every engine."""

import json
import os
import signal
import sys
from dataclasses import replace

import pytest
from engine_stand_in import DEADLINE_S, SERVER, after, seen, starting
from gone_processes import assert_gone
from typer.testing import CliRunner

from kvferry.cli import main
from kvferry.cli.options import AccessOptions, TransferOptions
from kvferry.cli.serve.command import JoinOptions, ServeOptions
from kvferry.cli.serve.sglang import settings_of, sglang_command, sglang_environment
from kvferry.cli.serve.sglang_launcher import main as launch
from kvferry.connectors.sglang.settings import VARIABLE, Settings, settings_from
from kvferry.errors import ConfigurationError
from kvferry.http.registration import Side

# What our check asks of SGLang, and its own start.
MODULES = {
    "sglang.launch_server": SERVER,
    "sglang.srt.plugins.__init__": "def load_plugins(): pass",
    "sglang.srt.arg_groups.choices": "DISAGG_TRANSFER_BACKEND_CHOICES = ['nixl', 'kvferry']",
    "sglang.srt.runtime_context": "get_parallel = None",
    "sglang.srt.disaggregation.base.conn": "class BaseKVManager: pass\nclass BaseKVBootstrapServer: pass",
    "sglang.srt.disaggregation.utils": """
import enum
class TransferBackend(enum.Enum):
    KVFERRY = "kvferry"
class KVClassType(enum.Enum):
    MANAGER = "manager"
def get_kv_class(backend, kind):
    from kvferry.connectors.sglang.manager import FerryManager
    return FerryManager
""",
}
LATER_SGLANG = MODULES | {
    "sglang.srt.disaggregation.utils": MODULES["sglang.srt.disaggregation.utils"].replace('"kvferry"', '"nixl"'),
    "sglang.srt.plugins.hook_registry": "HookRegistry = HookType = None",
}
OPTIONS = ServeOptions(
    model="m",
    served_name="name",
    engine_id="e-1",
    staging_mib=0,
    lease_timeout=0.0,
    transfer_port=7000,
    join=JoinOptions(role=[Side.PREFILL]),
)


def told(*arguments, engine="sglang"):
    result = CliRunner().invoke(main.app, ["serve", "--engine", engine, *arguments])
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    return " ".join(result.stderr.split())


@pytest.fixture
def installed(monkeypatch):
    """As if SGLang were, but nothing is loaded."""
    monkeypatch.setattr("kvferry.cli.engine_choice.check_installed", lambda engine: None)
    monkeypatch.setattr("kvferry.cli.models.resolve", lambda model: pytest.fail("loaded"))


def test_the_command_line_names_our_backend_and_the_port_of_transfers():
    command = sglang_command(replace(OPTIONS, port=8123), Side.PREFILL)
    assert (after(command, "--model-path"), after(command, "--served-model-name")) == ("m", "name")
    assert (after(command, "--host"), after(command, "--port"), after(command, "--dtype")) == (
        "127.0.0.1",
        "8123",
        "auto",
    )
    assert after(command, "--disaggregation-mode") == "prefill"
    assert after(command, "--disaggregation-transfer-backend") == "kvferry"
    assert after(command, "--disaggregation-bootstrap-port") == "7000"


def test_a_decode_server_listens_at_no_port_that_others_know():
    command = sglang_command(OPTIONS, Side.DECODE)
    assert after(command, "--disaggregation-mode") == "decode"
    assert "--disaggregation-bootstrap-port" not in command


def test_pages_have_16_tokens_unless_another_size_is_chosen_and_arguments_come_last():
    assert after(sglang_command(OPTIONS, Side.DECODE), "--page-size") == "16"
    command = sglang_command(replace(OPTIONS, block_tokens=64, arguments=("--tp", "2")), Side.DECODE)
    assert after(command, "--page-size") == "64"
    assert command[-2:] == ["--tp", "2"]


def test_what_is_chosen_becomes_settings_of_the_backend():
    chosen = replace(
        OPTIONS,
        transfer=TransferOptions("tcp", "pack", "pull", "full", staging_memory="device"),
        transfer_host="10.0.0.5",
        token_file="/run/secrets/kvferry",
        staging_mib=64,
        lease_timeout=12.5,
    )
    expected = Settings(
        "e-1", "10.0.0.5", "/run/secrets/kvferry", "tcp", "pull", "full", "pack", 64 << 20, "device", 12.5
    )
    assert settings_from(sglang_environment(chosen)) == expected
    assert settings_of(OPTIONS) == Settings("e-1")


def test_settings_that_no_option_has_said_are_refused(installed, monkeypatch):
    """Else an option that says the default, such as that bytes are compared, would not count."""
    monkeypatch.setenv(VARIABLE, '{"digest": "off"}')
    assert f"hint: unset {VARIABLE}" in told("--role", "decode", "--digest", "sampled")


def test_the_key_is_on_no_command_line_and_there_is_one():
    given = replace(OPTIONS, http_access=AccessOptions(["first-key"]))
    assert sglang_environment(given)["KVFERRY_API_KEY"] == "first-key"
    assert "first-key" not in " ".join(sglang_command(given, Side.DECODE))
    with pytest.raises(ConfigurationError, match="SGLang takes one --api-key"):
        sglang_environment(replace(OPTIONS, http_access=AccessOptions(["first-key", "second-key"])))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "an SGLang server has one role found: no --role expected: --role prefill or --role decode"),
        (("--role", "prefill", "--role", "decode"), "found: --role prefill --role decode"),
        (("--num-blocks", "7"), "this option does not apply to SGLang found: --num-blocks"),
        (("--heartbeat", "7"), "hint: pass options of sglang.launch_server after --"),
        (("--allowed-origins", "*"), "does not apply to SGLang"),
        (("--role", "decode", "--failure-policy", "recompute"), "cannot compute a prompt itself"),
        (
            ("--role", "decode", "--buffer-device", "cpu"),
            "does not apply to SGLang found: --buffer-device expected: none",
        ),
        (("--role", "prefill", "--layer-wise"), "do not move layer by layer"),
        (("--role", "decode", "--transfer-port", "7000"), "nobody asks a decode server of SGLang"),
        (("--role", "decode", "--transfer-host", "10.0.0.5"), "without a shared token"),
        (("--role", "decode", "--lease-timeout", "1"), "--lease-timeout is too short"),
        (("--role", "decode", "--engine-id", "a b"), "invalid engine id"),
        (("--role", "decode", "--", "--disaggregation-mode", "prefill"), "expected: kvferry's own --role"),
        (("--role", "decode", "--", "--disaggregation-bootstrap-port=1"), "expected: kvferry's own --transfer-port"),
        (("--role", "decode", "--", "--disaggregation-transfer-backend", "nixl"), "none: it is kvferry"),
        (("--role", "decode", "--", "--disaggregation-ib-device", "mlx5_0"), "UCX_NET_DEVICES"),
        (("--role", "decode", "--", "--port", "1"), "expected: kvferry's own --port"),
        (("--role", "decode", "--", "--ssl-keyfile", "k"), "a proxy that ends TLS"),
        (("--role", "decode", "--advertise-url", "http://a:1"), "this option needs --register"),
    ],
)
def test_what_sglang_does_not_do_is_refused_before_it_starts(installed, arguments, words):
    assert words in told(*arguments)


def test_what_sglang_does_by_itself_may_be_said(monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr("kvferry.cli.engine_choice.check_installed", lambda engine: None)
    monkeypatch.setattr("kvferry.cli.serve.sglang.serve_sglang", lambda options: asked.append(options) or 0)
    arguments = ["--model", str(tmp_path), "--role", "decode", "--failure-policy", "fail", "--", "--tp", "2"]
    for _ in range(2):
        result = CliRunner().invoke(main.app, ["serve", "--engine", "sglang", *arguments])
        assert result.exit_code == 0, result.output
    assert (asked[0].lease_timeout, asked[0].staging_mib, asked[0].arguments) == (0, 0, ("--tp", "2"))
    # Of two servers that were given no name, each has its own.
    assert len({options.engine_id for options in asked}) == 2
    given = ["--model", str(tmp_path), "--role", "prefill", "--transfer-port", "7000", "--engine-id", "p0"]
    result = CliRunner().invoke(main.app, ["serve", "--engine", "sglang", *given])
    assert result.exit_code == 0, result.output
    assert (asked[2].transfer_port, asked[2].engine_id) == (7000, "p0")


class TestLauncher:
    def test_a_later_sglang_is_refused_with_the_reason(self, tmp_path):
        with starting(tmp_path, "sglang", LATER_SGLANG) as start:
            process = start("--role", "decode")
            output, words = process.communicate(timeout=DEADLINE_S)
        assert (process.returncode, output) == (2, b"")
        assert b"kvferry's transfer backend does not fit this SGLang" in words
        assert b"add_disagg_transfer_backend_choices" in words
        assert not (tmp_path / "seen.json").exists()

    def test_a_plug_in_that_is_left_out_is_told_of(self, monkeypatch, capsys):
        monkeypatch.setattr("kvferry.connectors.sglang.plugin._is_used", lambda: False)
        monkeypatch.setattr("kvferry.connectors.sglang.plugin.register", lambda: None)
        monkeypatch.setitem(sys.modules, "sglang.srt.plugins", type(os)("plugins"))
        sys.modules["sglang.srt.plugins"].load_plugins = lambda: None
        monkeypatch.setenv("SGLANG_PLUGINS", "another")
        with pytest.raises(SystemExit, match="2"):
            launch()
        words = capsys.readouterr().err
        assert "SGLang does not load kvferry's plug-in" in words
        assert "SGLANG_PLUGINS=another" in words


@pytest.fixture
def start(tmp_path):
    """Start the real command with the stand-in on the path; returns the process."""
    with starting(tmp_path, "sglang", MODULES) as start:
        yield start


def test_it_announces_itself_and_where_it_moves_caches_and_leaves_nothing_behind(start, tmp_path):
    transfers = "--transfer-host", "127.0.0.2"
    process = start("--role", "prefill", "--engine-id", "p0", "--api-key", "a-key", *transfers, "--", "--tp", "2")
    ready = json.loads(process.stdout.readline())
    assert (ready["event"], ready["engine_id"], ready["model"]) == ("ready", "p0", tmp_path.name)
    arguments, pids = seen(tmp_path)
    assert arguments[-2:] == ["--tp", "2"]
    assert (after(arguments, "--api-key"), arguments.index("--api-key")) == ("a-key", 0)
    assert ready["url"] == f"http://127.0.0.1:{after(arguments, '--port')}"
    assert ready["transfer_address"] == f"tcp://127.0.0.2:{after(arguments, '--disaggregation-bootstrap-port')}"
    process.send_signal(signal.SIGTERM)
    assert process.wait(DEADLINE_S) == 0
    assert_gone(*pids)


def test_an_early_end_is_an_error_that_names_sglang(start):
    process = start("--role", "decode", "--", "--fail")
    output, words = process.communicate(timeout=DEADLINE_S)
    assert (process.returncode, output) == (2, b"")
    assert b"no such model" in words
    assert b"SGLang has exited" in words
