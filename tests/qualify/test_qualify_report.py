"""What outcomes mean in words, what leaves the machine, and what it looks like."""

from __future__ import annotations

import html
import json
import os
import re
import signal
import subprocess
import sys

import msgspec
import pytest
from gone_processes import assert_gone
from typer.testing import CliRunner

from kvferry.cli.main import app
from kvferry.cli.qualify import report as reports
from kvferry.cli.qualify.checks import CHECKS, Check
from kvferry.cli.qualify.one_check import outcome_of
from kvferry.cli.qualify.run import outcomes
from kvferry.extras import MissingExtraError
from kvferry.qualify import find_device
from kvferry.qualify.outcome import Figure, Outcome, Result, failed, passed, skipped
from kvferry.qualify.page import page
from kvferry.qualify.privacy import cleaner
from kvferry.qualify.verdict import Report, report_of
from kvferry.staging.device.table import BUILT_IN
from kvferry.transport.machine.facts import Accelerator

GOOD, BAD = passed("kernels", "every row is right"), failed("answers", "2 of 24 answers differ")
FAST = passed("copy rates", "1,024 MiB", (Figure("gather", 50.0, 0.96, "a pinned copy", 0.97, 0.9 * 0.97),))
NOT_FOR_IT = msgspec.structs.replace(skipped("kernels", "memory of the host needs none"), applies=False)
LEFT_OUT = skipped("fetches", "no UCX here")
IN_HOST = passed("transports in host memory", "5 of 5 move every byte")
IN_PART = passed("kernels", "every row is right, but far ones", left_out=("kernels beyond 4 GiB",))
SLOW = passed("copy rates", "1,024 MiB", (Figure("gather", 40.0, 0.8, "a pinned copy", 0.97, 0.9 * 0.97),))


@pytest.mark.parametrize(
    ("device", "found", "result", "words"),
    [
        ("cuda", [GOOD], "passed", "kvferry is right with this machine's CUDA devices."),
        ("cuda", [FAST], "passed", "kvferry is right with this machine's CUDA devices, and as fast as is expected."),
        # What a machine is says nothing for it.
        ("cuda", [passed("machine", "2 x H100")], "skipped", "Nothing was checked."),
        (
            "cuda",
            [failed("machine", "no driver")],
            "failed",
            "Do not use kvferry with this machine's CUDA devices as they are set up: machine failed.",
        ),
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
            "What was checked of kvferry is right with this machine's host memory. No accelerator was checked: "
            "this says nothing of devices. Not checked: fetches; the reasons are below.",
        ),
        (
            "cpu",
            [BAD],
            "failed",
            "Do not use kvferry with this machine's host memory as it is set up: answers failed. No accelerator was "
            "checked: this says nothing of devices.",
        ),
        (
            "cpu",
            [GOOD, FAST, NOT_FOR_IT],
            "passed",
            "kvferry is right with this machine's host memory. No accelerator was checked: "
            "this says nothing of devices.",
        ),
        ("tpu", [LEFT_OUT], "skipped", "Nothing was checked. Not checked: fetches; the reasons are below."),
        # Nor is what lies between two processes of the host.
        (
            "cuda",
            [IN_HOST, LEFT_OUT],
            "skipped",
            "Nothing was checked on this machine's CUDA devices. What was checked of kvferry is right with the memory "
            "of their host. Not checked: fetches; the reasons are below.",
        ),
        ("cuda", [IN_HOST, GOOD], "passed", "kvferry is right with this machine's CUDA devices."),
        (
            "cuda",
            [failed("transports in host memory", "bytes are wrong"), GOOD],
            "failed",
            "Do not use kvferry with this machine's CUDA devices as they are set up: transports in host memory failed.",
        ),
        (
            "cpu",
            [IN_HOST],
            "passed",
            "kvferry is right with this machine's host memory. No accelerator was checked: "
            "this says nothing of devices.",
        ),
        (
            "cuda",
            [IN_PART, LEFT_OUT],
            "passed",
            "What was checked of kvferry is right with this machine's CUDA devices. Not checked: kernels beyond 4 GiB "
            "and fetches; the reasons are below.",
        ),
    ],
)
def test_the_verdict_is_in_plain_words(device, found, result, words):
    report = report_of("1.2", device, found, 61.04)
    assert (report.result, report.verdict, report.seconds) == (result, words, 61.0)


def test_several_names_are_listed_as_people_do():
    three = [failed(name, "") for name in ("kernels", "answers", "restart")]
    assert "kernels, answers and restart failed" in report_of("1", "cuda", three, 1.0).verdict


NAMES = ("gpu-node-17", "gpu-node-17.example.org", "ann", "root", "x")


@pytest.mark.parametrize(
    "secret",
    [
        *("/home/ann/models/llama", "/usr/lib/x86_64-linux-gnu/libcuda.so.1", "~/caches/kv", "file:///srv/data/x"),
        *("/tmp", "/data", "~bob/keys", "../secret/keys", "a.b/home/bob/secret", "/home/bob:/home/eve/models"),
        *("10.1.2.3", "192.168.0.17:8000", "fe80::1ff:fe23:4567:890a", "[2001:db8::1]:443", "00:1b:44:11:3a:b7"),
        *("gpu-node-17.example.org", "gpu-node-17", "GPU-NODE-17", "node_gpu-node-17_1", "ann", "0x7f3a5c001000"),
        *("http://other.corp.example:8000/v1", "other.corp.example", "ip-10-1-2-3", "7f3a5c001000"),
        *("8f4e2b1a-1234-1234-1234-123456789abc", "node42.local", "store.corp:9000", "corp.com", "node42.lan"),
        *("/home/ann/corp/weights.bin", "/root/.corp/key.pem", "~ann/corp", "gpu-node-17:/srv/corp/weights"),
        *("/home/ann/my own eve dir/keys", "/home/ann/My Documents/corp files/weights", "~bob/my things/keys"),
        *("ann@gpu-node-17:/corp", "../ann/corp/keys", "http://gpu-node-17/corp", "version/10.1.2.3"),
    ],
)
def test_nothing_names_the_machine_or_its_user(secret):
    text = f"open failed ({secret}): no, {secret}; '{secret}', path:{secret} {secret}. {secret}"
    found = cleaner(NAMES)(Outcome("machine", Result.FAILED, text, facts=((f"a {secret}", text),)))
    told = msgspec.json.encode(found).decode()
    assert secret.lower() not in told.lower()
    assert not re.search("bob|eve|keys|corp|42|srv|weights|10[.]1", told)


@pytest.mark.parametrize("quote", ["'", '"'])
def test_a_path_in_quotes_ends_with_them(quote):
    inside = "/home/ann/Eve's own keys" if quote == '"' else "/home/ann/Documents/eve keys"
    text = f"couldn't open {quote}{inside}{quote}, as 2 of 9 reads/writes"
    told = f"couldn't open {quote}(path){quote}, as 2 of 9 reads/writes"
    assert cleaner(NAMES)(passed("machine", text)).words == told


@pytest.mark.parametrize(
    "text",
    [
        "UCX_TLS=ze_ipc,ze_copy,tcp; 2 sets that cannot work are refused",
        "1.5.1 of nixl-cu13, torch 2.13.0+cpu, read 5.3 GB/s at 12:34:56",
        "one of 9 reads/writes; hint: kvferry[agent]; planned 3/4; 400 Gbit/s",
        "cuDNN 9.1.0.70, nvidia-cudnn-cu12==9.1.0.70, cuBLAS version 12.8.3.14; key.pem, torch.cuda, file.py:12",
        "rc_mlx5/mlx5_0:1, tcp/lo, cuda_ipc/cuda; docs/transports.md",
        "Linux 6.18.44-fc-v669 on x86_64; pip install 'kvferry[nixl]'; kernel.yama",
    ],
)
def test_what_names_nobody_stays(text):
    assert cleaner(NAMES)(passed("machine", text)).words == text


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
    return list(outcomes(checks, "cpu", lambda _: None, lambda outcome: outcome, total_s))


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


@pytest.mark.slow
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
    assert_gone(int(child.read_text()))


# What has started the tests may have it ignore SIGHUP, as nohup does.
RUN_HANGING = """
import signal
signal.signal(signal.SIGHUP, signal.SIG_DFL)
from kvferry.cli.qualify.checks import Check
from kvferry.cli.qualify.run import outcomes
from kvferry.cli.signals import end_as_ctrl_c
end_as_ctrl_c()
list(outcomes([Check("hangs", "hangs", 600.0)], "cpu", print, lambda outcome: outcome))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_nothing_is_left_of_a_check_whose_command_is_ended(module, tmp_path, monkeypatch, number):
    """Closing a terminal does so, a time limit of a pipeline, and whoever is out of memory."""
    child, folder = tmp_path / "child", tmp_path / "temporary"
    os.mkfifo(child)
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    module(
        "hangs",
        "import os, pathlib, subprocess, time\n"
        "def run(kind):\n"
        "    child = subprocess.Popen(['sleep', '600'])\n"
        f"    pathlib.Path({str(child)!r}).write_text(f'{{os.getpid()}} {{child.pid}}')\n"
        "    time.sleep(600)",
    )
    with subprocess.Popen(
        [sys.executable, "-c", RUN_HANGING], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        try:
            pids = [int(word) for word in child.read_text().split()]
            process.send_signal(number)
            assert_gone(process.pid, *pids)
        finally:
            process.kill()
    assert number == signal.SIGKILL or list(folder.iterdir()) == []


@pytest.mark.slow
def test_what_the_ten_minutes_cut_off_has_not_failed(module):
    (found,) = run(module("slow", "import time\ndef run(kind): time.sleep(600)", limit_s=60.0), total_s=6.0)
    assert (found.result, found.words) == (Result.SKIPPED, "the 0.1 minutes are over")


@pytest.mark.parametrize("error", ["MemoryError()", "RuntimeError('CUDA out of memory. Tried to allocate 2.00 GiB')"])
def test_too_little_memory_says_nothing_of_what_is_right(module, error):
    (found,) = run(module("hungry", f"def run(kind): raise {error}"))
    assert (found.result, found.words.startswith("not enough memory is free")) == (Result.SKIPPED, True)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ModuleNotFoundError("no", name="triton"), "kvferry[engine,kernels]"),
        (MissingExtraError("NIXL is not installed"), "NIXL is not installed"),
    ],
)
def test_a_library_that_is_not_installed_leaves_the_check_out(monkeypatch, error, words):
    def missing(name):
        raise error

    monkeypatch.setattr("kvferry.cli.qualify.one_check.import_module", missing)
    found = outcome_of("x", "cuda")
    assert (found.result, words in found.words) == (Result.SKIPPED, True)


def test_where_the_machine_is_not_fit_nothing_else_is_tried(module):
    first = module("first", "def run(kind): return failed('', 'no driver')")
    found = run(first, module("second", "def run(kind): return passed('', '')"))
    assert [(each.result, each.words) for each in found] == [
        (Result.FAILED, "no driver"),
        (Result.SKIPPED, "first: no driver"),
    ]


def test_when_the_time_is_over_nothing_is_begun():
    found = run(CHECKS[0], total_s=1.0)
    assert {(each.result, each.words) for each in found} == {(Result.SKIPPED, "the 0.0167 minutes are over")}


def test_every_check_is_there_and_says_of_every_device_whether_it_is_for_it():
    for check in CHECKS:
        module = __import__(check.module, fromlist=["run"]) if check.name != "arrays of JAX" else None
        assert module is None or (module.NAME, callable(module.run)) == (check.name, True)
        assert check.not_for.keys() <= BUILT_IN.keys()
    for device in BUILT_IN:
        assert sum(device not in check.not_for for check in CHECKS) >= 2


# --- the command ---


NOT_RUN_ON_CPUS = {"UCX settings", "kernels", "copy rates", "transports in device memory", "arrays of JAX"}


@pytest.mark.slow
def test_only_what_is_asked_for_is_run_and_told_as_json(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = CliRunner().invoke(app, ["qualify", "--only", "transports in host memory", "--device", "cpu", "--json"])
    assert found.exit_code == 0, found.output
    told = json.loads(found.stdout)
    results = {each["check"]: each["result"] for each in told["outcomes"]}
    assert results.keys() == {check.name for check in CHECKS}
    assert {name for name, result in results.items() if result == "passed"} == {"machine", "transports in host memory"}
    words = {each["check"]: each["words"] for each in told["outcomes"] if each["applies"]}
    left_out = [name for name, text in words.items() if text == "left out by --only"]
    assert left_out == ["fetches", "answers", "restart"]
    assert {each["check"] for each in told["outcomes"] if not each["applies"]} == NOT_RUN_ON_CPUS
    assert told["verdict"].startswith("What was checked of kvferry is right with this machine's host memory.")
    assert told["verdict"].endswith("Not checked: fetches, answers and restart; the reasons are below.")
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


def test_nothing_that_anybody_sees_names_the_machine(module, monkeypatch, tmp_path):
    """On stdout, on stderr, and on the page."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(reports, "_names", lambda: ("gpu-node-17",))
    secret = "gpu-node-17 at 10.1.2.3: /home/bob/libcuda.so"
    check = module("telling", f"import os\ndef run(kind): print({secret!r}, flush=True); os._exit(3)")
    monkeypatch.setattr(reports, "_checks", lambda only: (check,))
    for words in (["--json"], []):
        found = CliRunner().invoke(app, ["qualify", "--device", "cpu", *words])
        seen = found.output + found.stderr + (tmp_path / "kvferry-qualify.html").read_text()
        assert "(name) at (address): (path)" in " ".join(seen.split())
        assert not re.search(r"gpu-node|10\.1|bob", seen)


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        # Of 300 characters the first would be amid a path, and amid a name.
        ("/home/bob/" + "secret" * 60 + "/lib.so: no", "(path): no"),
        ("cannot open '/home/bob/secret keys/" + "x" * 290 + "'", "cannot open '(path)'"),
        ("on gpu-node-17 " + "y" * 292, "(name) " + "y" * 292),
        # Of more than ten thousand, whole lines.
        ("secret " * 2000 + "\nat /home/bob/keys\nno", "at (path) no"),
        ("secret" * 2000 + "\rno", "no"),
        ("/home/bob/" + "secret" * 2000, "(a line too long to be shown)"),
        ("ü" * 9000, "(a line too long to be shown)"),
        ("", "it has said nothing"),
    ],
)
def test_the_last_words_of_a_check_are_cleaned_before_they_are_cut(module, said, shown):
    check = module("saying", f"import os\ndef run(kind): print({said!r}, end='', flush=True); os._exit(3)")
    (found,) = outcomes([check], "cpu", lambda _: None, cleaner(NAMES))
    start, _, words = found.words.partition("(exit code 3): ")
    assert (start, len(words) <= 300) == ("its process has ended ", True)
    assert words.endswith(shown), words
    assert not re.search("bob|secret|keys|gpu|node", words)


@pytest.mark.parametrize(
    ("bus", "reached", "kind"),
    [
        ([], {}, "cpu"),
        (["xpu", "cuda"], {"cuda": 2}, "cuda"),
        # A processor's own graphics, or a card that the container was not given.
        (["xpu"], {}, "cpu"),
        ([], {"xpu": 1}, "xpu"),
        (["tpu", "tpu"], {}, "tpu"),
    ],
)
def test_the_device_is_one_that_the_libraries_reach(monkeypatch, bus, reached, kind):
    monkeypatch.setattr(find_device, "accelerators", lambda: [Accelerator("0", each) for each in bus])
    monkeypatch.setattr(find_device, "number_of", lambda each: reached.get(each, 0))
    assert find_device.find_device() == kind


def test_a_driver_that_ends_the_process_leaves_the_choice_to_the_user(monkeypatch):
    monkeypatch.setattr(reports, "FIND", "no_such_module")
    found = CliRunner().invoke(app, ["qualify"])
    assert (found.exit_code, "name one with --device" in found.output) == (2, True)


def test_a_device_that_no_check_was_asked_to_touch_is_not_qualified(monkeypatch):
    monkeypatch.setattr(reports, "outcomes", lambda *_: iter([passed("machine", "2 x H100"), IN_HOST]))
    monkeypatch.setattr(reports, "missing_modules", lambda extra: [])
    words = ["qualify", "--device", "cuda", "--only", IN_HOST.check, "--page", ""]
    found = CliRunner().invoke(app, words)
    shown = " ".join(found.output.split())
    assert found.exit_code == 3, found.output
    assert "Nothing was checked on this machine's CUDA devices." in shown
    assert "Not checked: UCX settings, kernels, copy rates, transports in device memory, fetches, answers" in shown


@pytest.mark.parametrize(("outcome", "code"), [(GOOD, 0), (SLOW, 1), (BAD, 2), (LEFT_OUT, 3)])
def test_the_exit_code_says_what_came_of_it(monkeypatch, outcome, code):
    monkeypatch.setattr(reports, "outcomes", lambda *_: iter([outcome]))
    found = CliRunner().invoke(app, ["qualify", "--device", "cpu", "--page", ""])
    assert found.exit_code == code
    assert outcome.check in found.output
