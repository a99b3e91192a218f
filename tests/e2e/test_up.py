"""`kvferry up` as a user runs it."""

import json
import os
import pty
import shutil
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from conftest import DEADLINE_S

KEYS = {"equal", "text", "tokens_computed", "tokens_received", "bytes", "descriptors", "transport", "strategy"}


@pytest.fixture
def run(tiny_model):
    """Run `kvferry up` to its end, and see that it leaves no process behind."""

    def run(*arguments, model=tiny_model):
        command = [sys.executable, "-m", "kvferry.cli.main", "up", "--model", str(model), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S * 3, check=False)

    before = {process.pid for process in psutil.process_iter()}
    yield run
    new = [process for process in psutil.process_iter(["cmdline"]) if process.pid not in before]
    # Others may run servers of their own meanwhile; these serve this test's model.
    left = [process for process in new if str(tiny_model) in str(process.info["cmdline"])]
    _gone, alive = psutil.wait_procs(left, timeout=DEADLINE_S)
    assert not alive


@pytest.mark.parametrize(
    "transport", ["shm", *(pytest.param(name, marks=pytest.mark.slow) for name in ("cma", "tcp", "nixl"))]
)
def test_once_answers_proves_and_stops(run, transport):
    if transport == "nixl":
        pytest.importorskip("nixl_cu13", reason="the nixl extra is not installed")
    result = run("--once", "The ferry leaves at dawn", "--transport", transport, "--json")
    assert result.returncode == 0, result.stderr
    facts = json.loads(result.stdout)
    assert facts.keys() >= KEYS | {"phases_s"}
    assert facts["equal"] is True
    assert (facts["transport"], facts["strategy"], facts["tokens_computed"]) == (transport, "direct", 1)


@pytest.mark.slow
def test_the_proof_may_draw_tokens_with_one_seed(run):
    texts = set()
    for seed in ("7", "8"):
        result = run("--once", "The ferry leaves at dawn", "--temperature", "1.5", "--seed", seed, "--json")
        assert result.returncode == 0, result.stderr
        facts = json.loads(result.stdout)
        assert (facts["equal"], facts["temperature"], facts["seed"]) == (True, 1.5, int(seed))
        assert facts["tokens_computed"] == 1
        texts.add(facts["text"])
    assert len(texts) == 2


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.slow
def test_prefill_may_write_instead_of_decode_reading(run, transport):
    arguments = ("--transport", transport, "--prefill-block-tokens", "16", "--decode-block-tokens", "12", "--json")
    result = run("--once", "The ferry leaves at dawn", "--transfer-direction", "push", *arguments)
    assert result.returncode == 0, result.stderr
    facts = json.loads(result.stdout)
    assert (facts["equal"], facts["transport"], facts["tokens_computed"]) == (True, transport, 1)


@pytest.mark.slow
def test_once_with_two_of_each_prints_a_table(run):
    result = run("--once", "x", "--prefill", "2", "--decode", "2", "--max-tokens", "4")
    assert result.returncode == 0, result.stderr
    assert "equal, token for token" in result.stdout
    assert "prefill-1 is ready" in result.stderr


def test_a_model_that_is_not_there_is_one_clear_message(run):
    result = run("--once", "x", model=Path("/nowhere/at/all"))
    assert (result.returncode, result.stdout) == (2, "")
    assert "cannot load the model" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.slow
def test_weights_that_are_cut_off_are_one_clear_message(run, tiny_model, tmp_path):
    """As an interrupted download leaves them."""
    folder = shutil.copytree(tiny_model, tmp_path / "cut")
    os.truncate(folder / "model.safetensors", 100)
    result = run("--once", "x", model=folder)
    assert (result.returncode, result.stdout) == (2, "")
    assert "cannot load the model" in result.stderr
    assert "deserializing header" in result.stderr
    assert "Traceback" not in result.stderr


def test_an_unknown_transport_is_one_clear_message(run):
    result = run("--once", "x", "--transport", "pigeon")
    assert (result.returncode, result.stdout) == (2, "")
    assert "expected: auto or one of shm, cma, nixl, tcp" in result.stderr


def test_a_port_in_use_is_one_clear_message(run, tmp_path):
    """And nothing is deleted from a folder that was named, however it is spelled."""
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "precious").touch()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        result = run("--once", "x", "--port", str(taken.getsockname()[1]), "--log-dir", f"{tmp_path}//logs")
    assert (tmp_path / "logs" / "precious").exists()
    assert (result.returncode, result.stdout) == (2, "")
    assert "cannot listen on 127.0.0.1" in result.stderr
    assert "choose another --port" in result.stderr
    assert "is ready" not in result.stderr


def test_an_empty_prompt_is_one_clear_message(run):
    result = run("--once", "")
    assert (result.returncode, result.stdout) == (2, "")
    assert "--once needs a prompt" in result.stderr


@pytest.mark.slow
def test_a_prompt_longer_than_the_cache_is_one_clear_message(run):
    result = run("--once", "word " * 500, "--cache-tokens", "256")
    assert (result.returncode, result.stdout) == (2, "")
    assert "too long" in result.stderr


@contextmanager
def started(command, stderr=subprocess.PIPE, **more):
    """A process that does not outlive its test, whose words can be read."""
    with subprocess.Popen(command, text=True, stdout=subprocess.DEVNULL, stderr=stderr, **more) as parent:
        try:
            yield parent
        finally:
            parent.kill()


@pytest.mark.slow
def test_children_do_not_outlive_a_killed_parent(tiny_model, tmp_path):
    command = [sys.executable, "-m", "kvferry.cli.main", "up", "--model", str(tiny_model), "--port", "0"]
    # Nobody is left to delete its logs.
    with started(command, env=os.environ | {"TMPDIR": str(tmp_path)}) as parent:
        assert any("router is ready" in line for line in parent.stderr)
        children = psutil.Process(parent.pid).children(recursive=True)
        assert len(children) >= 3
        parent.send_signal(signal.SIGKILL)
        parent.wait(DEADLINE_S)
    _, alive = psutil.wait_procs(children, timeout=DEADLINE_S)
    assert not alive


@pytest.mark.parametrize(("after", "code"), [("starting", 130), ("Ctrl-C or SIGTERM stops", 0)])
@pytest.mark.slow
def test_a_terminal_that_is_closed_ends_everything_and_leaves_nothing(tiny_model, tmp_path, after, code):
    command = [sys.executable, "-m", "kvferry.cli.main", "up", "--model", str(tiny_model), "--port", "0"]
    # Whoever runs these tests may have had it ignored, which children inherit.
    command = ["env", "--default-signal=HUP", *command]
    terminal, end = pty.openpty()
    with started(command, env=os.environ | {"TMPDIR": str(tmp_path)}, stderr=end) as parent:
        os.close(end)
        said = ""
        # The whole line: whoever is still writing it when the terminal closes has an error, and no signal yet.
        while after not in said or not said.endswith("\n"):
            said += os.read(terminal, 4096).decode()
        children = psutil.Process(parent.pid).children(recursive=True)
        # Nobody can say anything there from now on.
        os.close(terminal)
        parent.send_signal(signal.SIGHUP)
        assert parent.wait(DEADLINE_S) == code
    _, alive = psutil.wait_procs(children, timeout=DEADLINE_S)
    assert not alive
    assert not list(tmp_path.glob("kvferry-*"))


@pytest.mark.slow
def test_ctrl_c_ends_what_a_script_has_started_in_the_background(tiny_model):
    """A shell without job control has such a process ignore SIGINT."""
    command = [sys.executable, "-m", "kvferry", "up", "--model", str(tiny_model), "--port", "0"]
    with started(["env", "--ignore-signal=INT", *command]) as parent:
        assert any("Ctrl-C or SIGTERM stops" in line for line in parent.stderr)
        family = psutil.Process(parent.pid).children(recursive=True)
        parent.send_signal(signal.SIGINT)
        assert parent.wait(DEADLINE_S) == 0
        assert "stopping: waiting for prefill-0, decode-0, router to end" in parent.stderr.read()
    _, alive = psutil.wait_procs(family, timeout=DEADLINE_S)
    assert not alive


@pytest.mark.slow
def test_what_was_started_with_nohup_outlives_its_terminal(tiny_model):
    command = ["nohup", sys.executable, "-m", "kvferry.cli.main", "up", "--model", str(tiny_model), "--port", "0"]
    with started(command) as parent:
        assert any("Ctrl-C or SIGTERM stops" in line for line in parent.stderr)
        family = [psutil.Process(parent.pid), *psutil.Process(parent.pid).children(recursive=True)]
        for one in family:
            one.send_signal(signal.SIGHUP)
        parent.send_signal(signal.SIGTERM)
        assert parent.wait(DEADLINE_S) == 0
    _, alive = psutil.wait_procs(family, timeout=DEADLINE_S)
    assert not alive


@pytest.fixture(scope="module")
def windowed_model(tiny_model, tmp_path_factory):
    """Sliding-window and full-attention layers in one model: two cache groups, one of them a ring."""
    import torch
    from transformers import AutoTokenizer, Gemma3ForCausalLM, Gemma3TextConfig

    folder = tmp_path_factory.mktemp("windowed")
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    config = Gemma3TextConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        sliding_window=48,
        max_position_embeddings=4096,
        initializer_range=0.08,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        Gemma3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_a_model_with_sliding_windows_and_other_blocks_on_each_side(run, windowed_model):
    prompt = "the river and the ferry cross, " * 30
    result = run("--once", prompt, "--decode-block-tokens", "24", "--json", model=windowed_model)
    assert result.returncode == 0, result.stderr
    facts = json.loads(result.stdout)
    assert (facts["equal"], facts["tokens_computed"], facts["recomputed"]) == (True, 1, "")
    assert facts["prompt_tokens"] > 200
    num_full_tokens, num_window_tokens = facts["prompt_tokens"] - 1, 47
    assert facts["bytes"] == (num_full_tokens * 1 + num_window_tokens * 5) * 2 * 2 * 32 * 4


@pytest.mark.slow
def test_the_whole_fleet_can_ask_for_a_key(tiny_model):
    """Engines, router and the proof share it through the environment."""
    environment = {**os.environ, "KVFERRY_API_KEY": "a-key-of-this-test"}
    command = [
        sys.executable,
        "-m",
        "kvferry",
        "up",
        "--model",
        str(tiny_model),
        "--once",
        "The ferry leaves",
        "--json",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["equal"], found["path"]) == (True, "disaggregated")
    assert "a-key-of-this-test" not in done.stdout + done.stderr
