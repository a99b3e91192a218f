"""What is in brackets reaches the screen: rich would take `[agent]`, or an IPv6 address, for a style."""

from __future__ import annotations

import json
import re
from contextlib import nullcontext
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvferry.cli import console
from kvferry.cli.doctor import report as doctor
from kvferry.cli.doctor.command import DoctorOptions
from kvferry.cli.main import app
from kvferry.cli.top import watch
from kvferry.cli.top.command import TopOptions

SOURCE = Path(__file__).parents[2] / "src" / "kvferry"
URL = "http://[fd00::1]:8200"
MEMBER = {"role": "decode", "url": URL, "healthy": True, "ready": True, "breaker": "closed"}
MEMBER |= {"in_flight_requests": 0, "in_flight_tokens": 0, "prefill_tokens_per_s": 0.0, "models": ["tiny"]}
FLEET = {"members": [MEMBER], "broken_pairs": [], "incompatible_pairs": []}


def test_no_screen_reads_markup():
    files = {path: path.read_text() for path in SOURCE.rglob("*.py") if "testing" not in path.parts}
    made = [call for text in files.values() for call in re.findall(r"\bConsole\(.*", text)]
    assert len(made) > 5
    assert [call for call in made if "markup=False" not in call] == []
    # `:a:` is a picture to rich, and a part of an address to everybody else.
    assert [call for call in made if "emoji=False" not in call] == []


@pytest.mark.parametrize("once", [True, False])
def test_top_shows_the_whole_address(monkeypatch, capsys, once):
    def answer(url, timeout_s):
        return json.dumps(FLEET).encode() if url.endswith("/kvferry/members") else b""

    def end(seconds):
        rounds.append(seconds)
        if len(rounds) > 1:
            raise KeyboardInterrupt

    rounds = []
    monkeypatch.setattr(watch, "get", answer)
    monkeypatch.setenv("COLUMNS", "120")
    with nullcontext() if once else pytest.raises(KeyboardInterrupt):
        watch.top(TopOptions("http://127.0.0.1:1", 0.0, once, as_json=False), end)
    assert URL in capsys.readouterr().out


def test_plan_shows_the_whole_path_of_a_model(tmp_path):
    folder = tmp_path / "[bold]model"
    folder.mkdir()
    shape = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64, "torch_dtype": "float16"}
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "vocab_size": 99} | shape))
    shown = CliRunner().invoke(app, ["plan", "--model", str(folder), "--prefill", "tp=2", "--decode", "tp=1"])
    assert "[bold]model" in "".join(shown.stdout.split())
    assert "[dim]" not in shown.stdout


def test_doctor_names_the_extra(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "missing_modules", lambda extra: ["zmq"])
    monkeypatch.setattr(doctor, "_examine", lambda options: doctor._Report((), {}, ()))
    doctor.doctor(DoctorOptions(device="cpu", buffer_device="cpu"))
    assert "kvferry[agent] is not installed" in capsys.readouterr().out


def test_what_is_said_keeps_its_brackets(capsys):
    console.say(f"routing at {URL}")
    assert URL in capsys.readouterr().err
