"""Blocks of code in the documents: commands have their options, JSON and YAML can be read, Python runs."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import textwrap
import tomllib

import pytest
import yaml
from docs_pages import ROOT, blocks, calls_of, commands, options_of, pages, subcommand

from kvferry.connectors.sglang.settings import VARIABLE, Settings, settings_from

LANGUAGES = {"bash", "python", "json", "yaml", "toml", "promql", "text"}
# Programs of others that documents call.
OTHERS = {
    "umask",
    "printf",
    "openssl",
    "cat",
    "grep",
    "kill",
    "pip",
    "docker",
    "cd",
    "export",
    "claude",
    "vllm-router",
    "helm",
    "kubectl",
    "serve",
}
SOURCE = ROOT / "src"


def unknown_options(words):
    """Options that our command does not have; what follows `--` is somebody else's."""
    command, rest = subcommand(words)
    rest = rest[: rest.index("--")] if "--" in rest else rest
    given = {word.partition("=")[0] for word in rest if re.match(r"--?[a-z]", word)}
    return given - options_of(command) - {"--help", "-h"}


def test_every_block_says_which_language_it_is_in():
    assert [str(block) for block in blocks() if block.language not in LANGUAGES] == []
    assert len(blocks()) > 40


@pytest.mark.parametrize("block", blocks("bash"), ids=str)
def test_every_shell_block_is_a_script_of_known_programs(block):
    checked = subprocess.run(["bash", "-n"], input=block.text, capture_output=True, text=True, check=False)
    assert checked.stderr == ""
    known = OTHERS | {"kvferry", "make", "python", "curl", "vllm"}
    assert {words[0] for words in commands(block.text)} <= known


def test_every_kvferry_command_has_the_options_that_are_shown():
    calls = calls_of("kvferry")
    assert len(calls) > 30
    wrong = [(place, words, unknown_options(words)) for place, words in calls if unknown_options(words)]
    assert wrong == []
    bare = [place for place, words in calls if subcommand(words)[0].name == "" and "--version" not in words]
    assert bare == []


def test_every_make_target_exists_and_takes_what_is_passed():
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z][\w-]*):", makefile, re.MULTILINE))
    variables = set(re.findall(r"^([A-Z_]+) \?=", makefile, re.MULTILINE))
    calls = calls_of("make")
    assert len(calls) > 10
    for place, words in calls:
        for word in words:
            name, sign, value = word.partition("=")
            assert name in (variables if sign else targets), (place, word)
            if words[0] == "up" and name == "ARGS":
                assert not unknown_options(["up", *commands(value)[0]]), place


def test_every_script_that_is_called_exists_and_has_the_options():
    for place, words in calls_of("python"):
        if words[:2] == ["-m", "sglang.launch_server"]:
            continue
        name = words[1] if words[0] == "-m" else words[0]
        path = SOURCE / name.replace(".", "/") if words[0] == "-m" else ROOT / name
        path = path / "__main__.py" if path.is_dir() else path.with_suffix(".py")
        text = "".join(each.read_text() for each in path.parent.rglob("*.py"))
        assert path.exists(), place
        assert all(word.partition("=")[0] in text for word in words[1:] if word.startswith("--")), (place, words)


def test_every_extra_that_is_installed_exists():
    extras = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    text = "".join(page.read_text() for page in pages())
    named = re.findall(r"(?:kvferry|'\.|\"\.)\[([a-z,]+)\]", text)
    assert len(named) > 5
    assert {name for names in named for name in names.split(",")} <= extras


def test_every_body_that_is_sent_is_json():
    bodies = [(place, words[words.index("-d") + 1]) for place, words in calls_of("curl") if "-d" in words]
    assert len(bodies) > 2
    for _, body in bodies:
        json.loads(body)


def keys_of_the_connector():
    text = (SOURCE / "kvferry/connectors/vllm_keys.py").read_text()
    (keys,) = (node for node in ast.parse(text).body if isinstance(node, ast.ClassDef) and node.name == "ExtraConfig")
    return {field.target.id for field in keys.body if isinstance(field, ast.AnnAssign)}


def test_every_transfer_configuration_is_json_of_known_keys():
    options = [words for _, words in calls_of("vllm") if "--kv-transfer-config" in words]
    assert len(options) > 1
    for words in options:
        settings = json.loads(words[words.index("--kv-transfer-config") + 1])
        assert set(settings.get("kv_connector_extra_config", {})) <= keys_of_the_connector()


def test_every_key_of_sglangs_connector_is_in_its_table_and_its_example_can_be_read():
    page = (ROOT / "docs/sglang.md").read_text()
    assert set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)) == set(Settings.__struct_fields__)
    (example,) = re.findall(rf"{VARIABLE}='(.*)'", page)
    assert settings_from({VARIABLE: example}).token_file == "kvferry.token"


def test_every_key_of_the_connector_is_in_its_table():
    text = (ROOT / "docs/vllm.md").read_text()
    rows = "".join(re.findall(r"^\| (`[^|]+) \|", text, re.MULTILINE))
    assert keys_of_the_connector() <= set(re.findall(r"`(\w+)`", rows))


@pytest.mark.parametrize("block", [block for block in blocks("python") if block.title], ids=str)
def test_every_excerpt_is_in_its_file_as_it_is_shown(block):
    """Whole lines of it, all indented as much: forges show no includes, and these files have tests of their own."""
    lines = (ROOT / block.title).read_text().splitlines()
    shown = block.text.splitlines()
    parts = (lines[start : start + len(shown)] for start in range(len(lines)))
    assert shown in (textwrap.dedent("\n".join(part)).splitlines() for part in parts)


def test_the_tutorial_shows_its_example():
    shown = [block.text for block in blocks("python") if block.title == "examples/own_engine.py"]
    assert sum(text.count("\n") for text in shown) > 30


@pytest.mark.parametrize("block", [block for block in blocks("python") if not block.title], ids=str)
def test_every_python_block_runs(block, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(block.text, str(block), "exec"), {"__name__": "docs_example"})


@pytest.mark.parametrize("block", [*blocks("json"), *blocks("yaml"), *blocks("toml")], ids=str)
def test_every_block_of_data_can_be_read(block):
    assert {"json": json.loads, "yaml": yaml.safe_load, "toml": tomllib.loads}[block.language](block.text)
