"""`kvferry doctor` as somebody runs it who does not know what is wrong: real processes, made-up settings."""

import json
import os
import secrets
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.util import find_spec
from io import StringIO

import pytest
from rich.console import Console

from kvferry import read_token
from kvferry.agent.control.shared_token import NO_TOKEN
from kvferry.cli.doctor import machine_facts as doctor_facts
from kvferry.cli.doctor import peer
from kvferry.cli.doctor import report as command
from kvferry.cli.doctor.command import DoctorOptions
from kvferry.cli.doctor.peer import try_peer
from kvferry.cli.doctor.transport_tests import verdict
from kvferry.errors import ConfigurationError, TransportError
from kvferry.transport.machine.facts import Accelerator, Nic, NicKind, ProcessLimits, SystemFacts, UcxBuild
from kvferry.transport.machine.finding import Finding, Severity, finding_of, worst
from kvferry.transport.selection.measurement import Measurement

TRANSPORTS = {"shm", "cma", "nixl", "tcp"}
HAS_NIXL = find_spec("nixl_cu13") is not None
DEADLINE_S = 30.0
said = []


@pytest.fixture
def token(tmp_path):
    path = tmp_path / "kvferry.token"
    path.touch(mode=0o600)
    path.write_text(secrets.token_hex(32))
    return read_token(str(path))


def doctor(*arguments, **settings):
    """Its exit code and its JSON."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("UCX_", "KVFERRY_"))}
    words = [sys.executable, "-m", "kvferry.cli.main", "doctor", "--json", *arguments]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, env=environment | settings, check=False)
    return done.returncode, json.loads(done.stdout)


def found(report, part):
    return [finding for finding in report["findings"] if part in finding["what"]]


@pytest.fixture(scope="module")
def healthy():
    return doctor()


def test_the_report_has_values_with_their_origins_and_a_loopback_over_everything(healthy):
    code, report = healthy
    assert code in (0, 1)
    assert report["trials"]["loopback"]["place"] == "same host"
    rows = {row["transport"]: row for row in report["trials"]["loopback"]["transports"]}
    assert rows.keys() == TRANSPORTS
    assert rows["shm"]["error"] == ""
    assert rows["tcp"]["read"]["gigabytes_per_s"] > 0
    assert rows["tcp"]["write"]["gigabytes_per_s"] > 0
    assert rows["tcp"]["carriers"] == ["tcp"]
    origins = {fact["name"]: fact["origin"] for fact in report["facts"]}
    assert origins["UCX_RCACHE_MAX_UNRELEASED=1024"] == "chosen"
    assert origins["UCX_TLS left to UCX"] == origins["device"] == "default"
    assert {"versions", "extras", "devices", "network", "limits", "ucx", "settings"} == {
        f["section"] for f in report["facts"]
    }


def test_every_finding_says_what_to_do():
    """UCX itself warns here, too; that must not be among the data."""
    code, report = doctor("--device", "xpu", UCX_TLS="ze_copy,tcp")
    assert code == 2
    for finding in report["findings"]:
        assert finding.keys() == {"severity", "what", "found", "expected", "hint"}
        assert finding["hint"], finding
    assert ("UCX_MEMTYPE_CACHE=n", "chosen") in {(f["name"], f["origin"]) for f in report["facts"]}
    if HAS_NIXL:
        assert found(report, "cannot reach xpu memory")[0]["expected"] == "ze_copy"
        assert found(report, "names transports that this UCX does not have")


@pytest.mark.parametrize(("chosen", "says"), [({}, False), ({"UCX_LOG_LEVEL": "warn"}, True)])
@pytest.mark.slow
def test_ucx_says_nothing_itself_unless_it_was_told_to(chosen, says):
    pytest.importorskip("nixl_cu13")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("UCX_", "NIXL_"))}
    environment |= {"UCX_TLS": "no_such,tcp"} | chosen
    words = [sys.executable, "-m", "kvferry", "doctor"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, env=environment, check=False)
    assert "UCX  WARN" not in done.stdout
    assert ("UCX  WARN" in done.stderr) == says


def test_the_verdict_comes_first():
    words = [sys.executable, "-m", "kvferry", "doctor"]
    environment = os.environ | {"UCX_TLS": "ze_ipc,ze_copy,sm"}
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, env=environment, check=False)
    first, _, second, *_ = done.stdout.splitlines()
    assert first.startswith("Not ready for transfers as set up (1 error")
    assert "auto takes" in first
    assert second == "Findings"


def test_a_hopeless_set_is_an_error_with_the_explanation_and_nixl_is_not_tried():
    code, report = doctor(UCX_TLS="ze_ipc,ze_copy,sm")
    assert (code, report["severity"]) == (2, "error")
    (finding,) = found(report, "active messages")
    assert finding["hint"].startswith("add tcp to UCX_TLS")
    rows = {row["transport"]: row for row in report["trials"]["loopback"]["transports"]}
    assert "not tried" in rows["nixl"]["error"]
    assert ("UCX_TLS=ze_ipc,ze_copy,sm", "environment") in {(f["name"], f["origin"]) for f in report["facts"]}


def test_a_fallback_to_tcp_is_a_warning_although_everything_works():
    pytest.importorskip("nixl_cu13")
    code, report = doctor(UCX_TLS="tcp")
    rows = {row["transport"]: row for row in report["trials"]["loopback"]["transports"]}
    assert rows["nixl"]["error"] == ""
    assert all(carrier.startswith("tcp/") for carrier in rows["nixl"]["carriers"])
    (finding,) = found(report, "a slower transport")
    assert (code, finding["severity"]) == (1, "warning")
    assert "UCX_TLS=tcp is set" in finding["hint"]


@pytest.mark.parametrize(
    ("device", "buffer_device", "expected"),
    [
        ("", "", ("cpu", "cpu", "default", "default")),
        ("xpu", "", ("xpu", "xpu", "option", "default")),
        ("xpu", "cpu", ("xpu", "cpu", "option", "option")),
        ("abacus", "", ("abacus", "cpu", "option", "default")),
    ],
)
def test_the_device_is_the_option_or_what_is_found(monkeypatch, device, buffer_device, expected):
    monkeypatch.setattr(command, "accelerators", tuple)
    *names, origins = command._devices(DoctorOptions(device=device, buffer_device=buffer_device))
    assert (*names, *(origin for _, _, origin in origins)) == expected


def test_a_device_that_is_found_is_chosen(monkeypatch):
    monkeypatch.setattr(command, "accelerators", lambda: (Accelerator("0000:03:00.0", "cuda"),))
    *names, origins = command._devices(DoctorOptions())
    assert (*names, *(origin for _, _, origin in origins)) == ("cuda", "cuda", "chosen", "chosen")


def test_a_device_that_is_not_here_is_said_to_be_missing(monkeypatch):
    monkeypatch.setattr(command, "accelerators", lambda: (Accelerator("0000:03:00.0", "cuda"),))
    (finding,) = command._missing("rocm")
    assert (finding.severity, finding.expected) == ("warning", "rocm")
    assert not [*command._missing("cuda"), *command._missing("cpu")]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"device": "abacus"}, "unknown device"),
        ({"device": "tpu", "buffer_device": "tpu"}, "cannot use this buffer device"),
        ({"peer": "nobody"}, "invalid --peer address"),
        ({"peer": "127.0.0.1:9", "token_file": "/nowhere"}, "cannot be read"),
    ],
)
def test_a_wrong_option_is_told_before_anything_is_tried(monkeypatch, options, says):
    monkeypatch.setattr(command, "_examine", lambda options: pytest.fail("tried"))
    given = {"device": "", "buffer_device": "", "peer": "", "token_file": "", **options}
    with pytest.raises(ConfigurationError, match=says):
        command.doctor(DoctorOptions(**given, as_json=True))


def test_lines_are_wrapped_on_a_screen_and_whole_in_a_pipe():
    finding = Finding(Severity.NOTE, "what " * 30, "found " * 30)
    for is_terminal, widest in ((True, 80), (False, 240)):
        screen = Console(file=StringIO(), width=80, force_terminal=is_terminal, color_system=None)
        command._print_finding(screen, finding)
        command._line(screen, "name", "value " * 30)
        lines = screen.file.getvalue().splitlines()
        assert max(map(len, lines)) <= widest
        assert (len(lines) == 3) is not is_terminal


@pytest.mark.parametrize("number", [1, 2])
def test_it_says_how_many_tokens_a_file_holds(tmp_path, number):
    """docs/security.md has operators look at that before they change a token."""
    path = tmp_path / "step.token"
    path.touch(mode=0o600)
    path.write_text("".join(f"{secrets.token_hex(32)}\n" for _ in range(number)))
    facts = doctor_facts.setting_facts(None, SystemFacts("cpu", "cpu"), str(path))
    assert [fact.value for fact in facts if fact.name == "token file"] == [
        f"{path}: one token is used, {number - 1} more accepted"
    ]


def test_peers_that_are_not_there(token):
    for address, problem in (
        ("nobody", "invalid --peer address"),
        ("127.0.0.1", "invalid --peer address"),
        ("127.0.0.1:x", "invalid --peer"),
    ):
        with pytest.raises(ConfigurationError, match=problem):
            try_peer(address, NO_TOKEN, said.append)
    with pytest.raises(ConfigurationError, match=r"--token-file"):
        try_peer("192.0.2.1:4000", NO_TOKEN, said.append)
    with pytest.raises(TransportError, match=r"no engine answers at tcp://127\.0\.0\.1:1\b.*refused.*transfers at"):
        try_peer("tcp://127.0.0.1:1", token, said.append)


@pytest.mark.parametrize(
    ("greeting", "found"),
    [(None, r"nothing was said.*HTTP port"), (b"S", r"answers with b'S'"), (b"", "connection was closed")],
)
def test_who_listens_but_is_no_engine_is_asked_nothing(monkeypatch, greeting, found):
    monkeypatch.setattr(peer, "GREETING_S", 0.1 if greeting is None else DEADLINE_S)
    heard = []

    def listen():
        connection, _ = server.accept()
        with connection:
            if greeting is not None:
                connection.sendall(greeting)
                connection.shutdown(socket.SHUT_WR)
            heard.append(connection.recv(100))

    with socket.create_server(("127.0.0.1", 0)) as server:
        listening = threading.Thread(target=listen)
        listening.start()
        with pytest.raises(TransportError, match=rf"(?s)no engine answers.*{found}"):
            try_peer(f"127.0.0.1:{server.getsockname()[1]}", NO_TOKEN, said.append)
        listening.join(DEADLINE_S)
    assert heard == [b""]


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_transports_are_opened_at_the_address_that_the_peer_sees(monkeypatch, host):
    opened = []

    def open_none(requested, here):
        opened.append(here)
        raise TransportError("seen enough")

    monkeypatch.setattr(peer._Asking, "offer", lambda asking: None)
    monkeypatch.setattr(peer, "open_transports", open_none)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as server:
        greeting = threading.Thread(target=_greet, args=(server,))
        greeting.start()
        where = f"[{host}]" if ":" in host else host
        with pytest.raises(TransportError, match="seen enough"):
            try_peer(f"{where}:{server.getsockname()[1]}", NO_TOKEN, said.append)
        greeting.join(DEADLINE_S)
    assert opened == [host]


def test_a_transport_that_carries_itself_is_not_named_twice():
    direct = Measurement("shm", 2.0, 1.0, 1e-4, "", carriers=("shm",))
    assert "carried" not in command._words(direct)
    assert "carried by cma/memory" in command._words(replace(direct, name="nixl", carriers=("cma/memory",)))


def test_a_machine_without_the_agent_is_not_ready(monkeypatch):
    monkeypatch.setattr(command, "missing_modules", lambda extra: ["zmq"] if extra == "agent" else [])
    assert "kvferry[agent] is not installed" in command._verdict(command._Report((), {}, ()))
    monkeypatch.undo()
    assert command._verdict(command._Report((), {}, ())).startswith("Ready for transfers")


def test_severities_have_an_order():
    note, warning = Finding(Severity.NOTE, "a", ""), Finding(Severity.WARNING, "b", "")
    assert [worst(each) for each in ([], [note], [warning, note])] == ["ok", "note", "warning"]


def test_the_verdict_is_that_of_auto():
    shm, nixl, tcp = (
        Measurement(name, speed, speed, 1e-5, "", copies_once=name == "shm")
        for name, speed in (("shm", 2), ("nixl", 9), ("tcp", 1))
    )
    assert verdict([nixl, tcp, shm]) == "shm"
    assert verdict([nixl, tcp]) == "nixl"
    assert "no transport works" in verdict([Measurement("tcp", 0, 0, 0, "broken")])


@pytest.mark.parametrize(
    ("missing", "hint"),
    [
        (["router"], ""),
        (["engine"], "(for serve and up with transformers; not beside vLLM or SGLang, whose transformers it replaces)"),
        (
            ["agent", "engine"],
            "whose transformers it replaces); beside these: pip install 'kvferry[agent,router,nixl]'",
        ),
    ],
)
def test_the_extra_engine_is_not_for_the_environments_of_other_engines(monkeypatch, missing, hint):
    monkeypatch.setattr(doctor_facts, "missing_modules", lambda extra: ["zmq"] if extra in missing else [])
    monkeypatch.setattr("kvferry.extras._is_editable", lambda: False)
    findings = doctor_facts.machine_findings(SystemFacts("cpu", "cpu"), "")
    (found,) = [each for each in findings if each.what == "parts of kvferry are not installed"]
    assert found.found == ", ".join(missing)
    assert found.hint.startswith(f"pip install 'kvferry[{missing[-1]}]'")
    assert found.hint.endswith(hint)


def test_a_small_machine_with_two_copies_of_ucx(monkeypatch):
    builds = tuple(UcxBuild(owner, f"/site/{owner}.libs") for owner in ("nixl_cu12", "nixl_cu13"))
    monkeypatch.setattr(doctor_facts, "installed_builds", lambda: builds)
    monkeypatch.setattr(doctor_facts, "loaded_directories", tuple)
    nics = (Nic("mlx5_0:1", NicKind.ROCE, False, "down", 1, (), 100.0), Nic("eth1", NicKind.ETHERNET, False, "down"))
    limits = ProcessLimits(container="docker", shm_bytes=64 << 20, locked_bytes=8 << 20)
    system = SystemFacts("cpu", "cpu", nics=nics, build=builds[1], limits=limits)
    findings = {
        finding.what.split(":")[0].split(";")[0]: finding for finding in doctor_facts.machine_findings(system, "")
    }
    assert "/site/nixl_cu12.libs, /site/nixl_cu13.libs" in findings["there are several copies of UCX"].found
    assert findings["/dev/shm is small"].severity is Severity.NOTE
    facts = {fact.name: fact.value for fact in doctor_facts.machine_facts(system)}
    assert facts["mlx5_0:1"] == "roce, down, 100 Gbit/s, memory node 1"
    assert "eth1" not in facts
    assert facts["locked memory"] == "8 MiB"
    monkeypatch.setattr(doctor_facts, "loaded_directories", lambda: ("/a", "/b"))
    (both,) = [each for each in doctor_facts.machine_findings(system, "") if "loaded into one process" in each.what]
    assert both.severity is Severity.WARNING


def test_an_error_is_a_finding(tmp_path):
    (finding, *_) = doctor_facts.machine_findings(SystemFacts("cpu", "cpu"), str(tmp_path / "none"))
    assert finding.severity is Severity.ERROR
    assert finding_of(ConfigurationError("w", found="f", hint="h")) == Finding(Severity.ERROR, "w", "f", "", "h")


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_the_way_back_from_a_peer_is_the_address_that_it_is_reached_from(host):
    """Transports that are tried to a peer elsewhere must not listen on loopback only."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as listener, ThreadPoolExecutor(1) as thread:
        greeting = thread.submit(_greet, listener)
        address = f"[{host}]" if ":" in host else host
        assert peer._check_greeting(f"tcp://{address}:{listener.getsockname()[1]}") == host
        greeting.result()


def _greet(server):
    """As a control channel does."""
    with server.accept()[0] as connection:
        connection.sendall(peer.GREETING)
        connection.recv(1)
