"""What outcomes mean in words, what leaves the machine, and what it looks like."""

from __future__ import annotations

import html
import json
import re
import sys
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from kvferry.cli.main import app
from kvferry.cli.qualify import report as reports
from kvferry.cli.qualify.checks import CHECKS, Check
from kvferry.cli.qualify.one_check import outcome_of
from kvferry.cli.qualify.run import outcomes
from kvferry.qualify.outcome import Figure, Outcome, Result, failed, passed, skipped
from kvferry.qualify.page import page
from kvferry.qualify.privacy import without_names
from kvferry.qualify.verdict import Report, report_of
from kvferry.staging.device.table import BUILT_IN

GOOD, BAD = passed("kernels", "every row is right"), failed("answers", "2 of 24 answers differ")
LEFT_OUT = skipped("fetches", "no UCX here")
SLOW = passed("copy rates", "1,024 MiB", (Figure("gather", 40.0, 0.8, "a pinned copy", 0.97, 0.9 * 0.97),))


@pytest.mark.parametrize(
    ("device", "found", "result", "words"),
    [
        ("cuda", [GOOD], "passed", "kvferry is right with this machine's CUDA devices, and as fast as is expected."),
        (
            "rocm",
            [GOOD, SLOW],
            "slow",
            "kvferry is right with this machine's ROCm devices, but slower than it should be: copy rates.",
        ),
        (
            "xpu",
            [GOOD, SLOW, BAD],
            "failed",
            "Do not use kvferry with this machine's Intel XPU devices as they are set up: answers failed.",
        ),
        (
            "cpu",
            [GOOD, LEFT_OUT],
            "passed",
            "kvferry is right with this machine's host memory, and as fast as is expected. No accelerator was checked: "
            "this says nothing of devices. Not checked: fetches; the reasons are below.",
        ),
        (
            "cpu",
            [BAD],
            "failed",
            "Do not use kvferry with this machine's host memory as it is set up: answers failed. No accelerator was "
            "checked: this says nothing of devices.",
        ),
        ("tpu", [LEFT_OUT], "skipped", "Nothing could be checked here. Not checked: fetches; the reasons are below."),
    ],
)
def test_the_verdict_is_in_plain_words(device, found, result, words):
    report = report_of("1.2", device, found, 61.04)
    assert (report.result, report.verdict, report.seconds) == (result, words, 61.0)


def test_several_names_are_listed_as_people_do():
    three = [failed(name, "") for name in ("kernels", "answers", "restart")]
    assert "kernels, answers and restart failed" in report_of("1", "cuda", three, 1.0).verdict


@pytest.mark.parametrize(
    "secret",
    [
        *("/home/ann/models/llama", "/usr/lib/x86_64-linux-gnu/libcuda.so.1", "~/caches/kv", "file:///srv/data/x"),
        *("10.1.2.3", "192.168.0.17:8000", "fe80::1ff:fe23:4567:890a", "[2001:db8::1]:443", "00:1b:44:11:3a:b7"),
        *("gpu-node-17.example.org", "gpu-node-17", "GPU-NODE-17", "ann", "0x7f3a5c001000"),
    ],
)
def test_nothing_names_the_machine_or_its_user(secret):
    text = f"open failed ({secret}): no, {secret}; '{secret}'"
    found = Outcome("machine", Result.FAILED, text, facts=((f"a {secret}", text),))
    names = ("gpu-node-17", "gpu-node-17.example.org", "ann")
    told = msgspec.json.encode(without_names(report_of("1", "cuda", [found], 1.0), names)).decode()
    assert secret.lower() not in told.lower().replace("planned", "")


@pytest.mark.parametrize(
    "text",
    [
        "UCX_TLS=ze_ipc,ze_copy,tcp; 2 sets that cannot work are refused",
        "1.5.1 of nixl-cu13, torch 2.13.0+cpu, read 5.3 GB/s at 12:34:56",
        "one of 9 reads/writes; hint: kvferry[agent]; planned 3/4; 400 Gbit/s",
        "rc_mlx5/mlx5_0:1, tcp/lo",
    ],
)
def test_what_names_nobody_stays(text):
    found = without_names(report_of("1", "cuda", [passed("machine", text)], 1.0), ("ann", "x"))
    assert found.outcomes[0].words == text


def test_the_page_has_everything_and_the_report_itself():
    report = report_of("1.2", "cuda", [GOOD, SLOW, replace_words(BAD, "<b>2</b> & 3"), LEFT_OUT], 12.0)
    text = page(report)
    assert "&lt;b&gt;2&lt;/b&gt; &amp; 3" in text
    assert report.verdict.replace("'", "&#39;") in text
    assert '<rect class="bar is-slow" width="128.0"' in text
    assert '<line class="mark" x1="155.2"' in text
    told = re.search(r'<pre id="report">(.*?)</pre>', text, re.DOTALL).group(1)
    assert msgspec.json.decode(html.unescape(told), type=Report) == report


def replace_words(outcome, words):
    return msgspec.structs.replace(outcome, words=words)


# --- checks in processes of their own ---


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Make a module that is a check; returns it with a limit."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def make(name, text, limit_s=60.0):
        (tmp_path / f"{name}.py").write_text(f"from kvferry.qualify.outcome import *\n{text}\n")
        return Check(name, name, limit_s)

    return make


def run(*checks, total_s=600.0):
    return list(outcomes(checks, "cpu", lambda _: None, total_s))


def test_an_outcome_comes_from_another_process_whatever_is_printed_there(module):
    (found,) = run(module("loud", "print('{noise')\ndef run(kind): return passed('?', f'on {kind}')"))
    assert (found.check, found.result, found.words) == ("loud", Result.PASSED, "on cpu")
    assert found.seconds > 0


@pytest.mark.parametrize(
    ("name", "body", "words"),
    [
        ("raises", "def run(kind): raise RuntimeError('device lost')", "RuntimeError: device lost"),
        ("crashes", "import os, signal\ndef run(kind): os.kill(os.getpid(), signal.SIGSEGV)", "killed by SIGSEGV"),
        (
            "leaves",
            "import os\ndef run(kind): print('driver says no', flush=True); os._exit(3)",
            "(exit code 3): driver says no",
        ),
        ("unknown", "import no_such_library", "No module named 'no_such_library'"),
    ],
)
def test_whatever_goes_wrong_there_is_a_failure_of_the_check(module, name, body, words):
    (found,) = run(module(name, body))
    assert (found.result, words in found.words) == (Result.FAILED, True), found.words


def test_a_check_that_hangs_is_ended_with_all_that_it_has_started(module, tmp_path):
    child = tmp_path / "child"
    body = (
        "import pathlib, subprocess, time\n"
        "def run(kind):\n"
        "    child = subprocess.Popen(['sleep', '600'])\n"
        f"    pathlib.Path({str(child)!r}).write_text(str(child.pid))\n"
        "    time.sleep(600)"
    )
    (found,) = run(module("hangs", body, limit_s=8.0))
    assert (found.result, found.words) == (Result.FAILED, "it has not ended within 8 s: does the device hang?")
    status = Path(f"/proc/{child.read_text()}/stat")
    assert not status.exists() or status.read_text().rpartition(")")[2].split()[0] == "Z"


def test_a_library_that_is_not_installed_leaves_the_check_out(monkeypatch):
    monkeypatch.setitem(sys.modules, "kvferry.qualify.checks.kernels", None)
    monkeypatch.setattr("kvferry.cli.qualify.one_check.import_module", lambda name: __import__("triton_is_not_here"))
    assert outcome_of("x", "cuda").result is Result.FAILED
    error = ModuleNotFoundError("no", name="triton")

    def missing(name):
        raise error

    monkeypatch.setattr("kvferry.cli.qualify.one_check.import_module", missing)
    found = outcome_of("x", "cuda")
    assert (found.result, "kvferry[engine,kernels]" in found.words) == (Result.SKIPPED, True)


def test_where_the_machine_is_not_fit_nothing_else_is_tried(module):
    first = module("first", "def run(kind): return failed('', 'no driver')")
    found = run(first, module("second", "def run(kind): return passed('', '')"))
    assert [(each.result, each.words) for each in found] == [
        (Result.FAILED, "no driver"),
        (Result.SKIPPED, "first: no driver"),
    ]


def test_when_the_time_is_over_nothing_is_begun():
    found = run(*CHECKS[:2], total_s=1.0)
    assert {(each.result, each.words) for each in found[:1]} == {(Result.SKIPPED, "the 0.0166667 minutes are over")}


def test_every_check_is_there_and_says_of_every_device_whether_it_is_for_it():
    for check in CHECKS:
        module = __import__(check.module, fromlist=["run"]) if check.name != "arrays of JAX" else None
        assert module is None or (module.NAME, callable(module.run)) == (check.name, True)
        assert check.not_for.keys() <= BUILT_IN.keys()
    for device in BUILT_IN:
        assert sum(device not in check.not_for for check in CHECKS) >= 2


# --- the command ---


def test_only_what_is_asked_for_is_run_and_told_as_json(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = CliRunner().invoke(app, ["qualify", "--only", "transports in host memory", "--json"])
    assert found.exit_code in (0, 1), found.output
    told = json.loads(found.stdout)
    assert [each["check"] for each in told["outcomes"]] == ["machine", "transports in host memory"]
    assert told["device"] == "cpu"
    text = (tmp_path / "kvferry-qualify.html").read_text()
    assert told["verdict"].replace("'", "&#39;") in text
    for name in reports._names():
        assert len(name) < 3 or not re.search(rf"\b{re.escape(name)}\b", text)
    assert str(tmp_path) not in text


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--only", "speed"], "no such check"),
        (["--device", "abacus"], "unknown device"),
        (["--page", "page.pdf"], "the page must be an HTML file"),
        (["--page", "/nowhere/page.html"], "the folder does not exist"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_is_run(words, error):
    found = CliRunner().invoke(app, ["qualify", *words])
    assert (found.exit_code, error in found.output) == (2, True)


@pytest.mark.parametrize(("device", "extras"), [("cpu", "engine"), ("xpu", "engine,kernels"), ("tpu", "engine,jax")])
def test_libraries_that_are_not_installed_are_named_before_anything_is_run(monkeypatch, device, extras):
    monkeypatch.setattr(reports, "missing_modules", lambda extra: ["torch"] if extra == "torch" else [])
    found = CliRunner().invoke(app, ["qualify", "--device", device])
    assert found.exit_code == 2
    assert f"the checks need torch, not installed here: pip install 'kvferry[{extras}]'" in found.output


@pytest.mark.parametrize(("outcome", "code"), [(GOOD, 0), (SLOW, 1), (BAD, 2), (LEFT_OUT, 0)])
def test_the_exit_code_says_what_came_of_it(monkeypatch, outcome, code):
    monkeypatch.setattr(reports, "outcomes", lambda *_: iter([outcome]))
    found = CliRunner().invoke(app, ["qualify", "--page", ""])
    assert found.exit_code == code
    assert outcome.check in found.output
