"""What must not be in the source, whoever writes it: ways in which data becomes code, and checks that can be off."""

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src"
# Modules that run what they read.
MODULES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "yaml"}
CALLS = {"eval", "exec", "compile", "__import__"}
# Functions of other modules by their last names; `torch.load` and `numpy.load` can unpickle.
METHODS = {"deserialize_descs", "os.system", "os.popen", "torch.load", "np.load", "numpy.load", "yaml.load"}
# Shipped tests of transports and their oracle: they are run by pytest and check nothing that a user sends.
MAY_ASSERT = "kvferry/testing/"


def dotted(node: ast.expr) -> str:
    """`a.b.c` of such an expression; what is not a name is left out."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}".lstrip(".")
    return node.id if isinstance(node, ast.Name) else ""


def offences(tree: ast.AST, may_assert: bool) -> list[str]:
    """Line and reason of everything that must not be there."""
    found = []
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.Import):
            found += [f"{line}: import {name.name}" for name in node.names if name.name.split(".")[0] in MODULES]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in MODULES:
            found.append(f"{line}: from {node.module}")
        elif isinstance(node, ast.Assert) and not may_assert:
            found.append(f"{line}: assert")
        elif isinstance(node, ast.Call):
            found += [f"{line}: {reason}" for reason in _wrong_with(node)]
    return found


def _wrong_with(call: ast.Call) -> list[str]:
    name = dotted(call.func)
    found = [name] if name in CALLS or name in METHODS or name.split(".")[-1] in METHODS else []
    for keyword in call.keywords:
        if keyword.arg == "shell" and not (isinstance(keyword.value, ast.Constant) and keyword.value.value is False):
            found.append("shell=")
        if keyword.arg == "allow_pickle" and not (isinstance(keyword.value, ast.Constant) and not keyword.value.value):
            found.append("allow_pickle=")
    return found


def files() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


def test_the_source_was_found():
    assert len(files()) > 100


@pytest.mark.parametrize("path", files(), ids=lambda path: str(path.relative_to(SOURCE)))
def test_nothing_turns_data_into_code(path):
    may_assert = str(path.relative_to(SOURCE)).startswith(MAY_ASSERT)
    assert offences(ast.parse(path.read_text()), may_assert) == []


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "import os, marshal",
        "from pickle import loads",
        "from yaml import load",
        "eval(text)",
        "exec(text)",
        "assert value > 0",
        "subprocess.run(text, shell=True)",
        "subprocess.run(text, shell=flag)",
        "os.system(text)",
        "agent.deserialize_descs(data)",
        "torch.load(path)",
        "np.load(path, allow_pickle=True)",
    ],
)
def test_what_is_looked_for_would_be_found(line):
    assert len(offences(ast.parse(line), may_assert=False)) >= 1


def test_what_looks_alike_is_fine():
    text = "model.eval()\nre.compile(text)\nsubprocess.run(words, shell=False)\njson.load(file)\nyaml = 1"
    assert offences(ast.parse(text), may_assert=False) == []


# Where several threads decode. msgspec prepares a type at its first use, and two threads that use it first at once end
# the process: these build a `Decoder` when they are imported.
DECODED_BY_THREADS = ("kvferry/transport", "kvferry/wire", "kvferry/agent")


@pytest.mark.parametrize("package", DECODED_BY_THREADS)
def test_what_threads_decode_is_prepared_at_import(package):
    for path in sorted((SOURCE / package).rglob("*.py")):
        assert decoded_by_type(ast.parse(path.read_text())) == [], path


def decoded_by_type(tree: ast.AST) -> list[str]:
    names = ("msgspec.msgpack.decode", "msgspec.json.decode")
    return [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Call) and dotted(node.func) in names]


def test_a_type_prepared_at_its_first_use_would_be_found():
    assert decoded_by_type(ast.parse("x = msgspec.msgpack.decode(data, type=Kind)"))
    assert not decoded_by_type(ast.parse("x = DECODER.decode(data)"))
