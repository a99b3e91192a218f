"""What the command says where an extra is not installed: one line with the command that installs it."""

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from import_path import import_path

from kvferry import extras
from kvferry.cli.engine_choice import SERVER_EXTRAS

ROOT = Path(__file__).parents[2]
MODULES = sorted({module.partition(".")[0] for modules in extras.EXTRAS.values() for module in modules})
# Names of packages that differ from their modules'.
DISTRIBUTIONS = {"zmq": "pyzmq", "prometheus_client": "prometheus-client", "opentelemetry.sdk": "opentelemetry-sdk"}
HIDE = """
import sys
from importlib.machinery import PathFinder
class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        return None if name.partition(".")[0] in {hidden!r} else PathFinder.find_spec(name, path, target)
    invalidate_caches = PathFinder.invalidate_caches
    find_distributions = PathFinder.find_distributions
sys.meta_path[sys.meta_path.index(PathFinder)] = Finder
"""


def run(tmp_path, *arguments, hidden=(*MODULES, "nixl", "nixl_cu12", "nixl_cu13", "vllm", "llvmlite")):
    """The command, in a Python that does not find these modules; nor do its children."""
    (tmp_path / "sitecustomize.py").write_text(HIDE.format(hidden=tuple(hidden)))
    environment = os.environ | {"PYTHONPATH": import_path(tmp_path), "COLUMNS": "80"}
    command = [sys.executable, "-m", "kvferry", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=False)


@pytest.mark.parametrize(
    ("arguments", "extra"),
    [
        (("serve",), "engine"),
        (("up",), "engine"),
        (("route", "--decode", "http://127.0.0.1:1"), "router"),
        (("route", "--accept-registrations"), "router"),
        (("top",), "router"),
        (("bench", "serve"), "router"),
        (("doctor", "--peer", "127.0.0.1:1"), "agent"),
    ],
    ids=" ".join,
)
def test_a_missing_extra_is_one_line_with_the_command_that_installs_it(tmp_path, arguments, extra):
    done = run(tmp_path, *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert re.match(rf"error: the Python package \w+ is not installed: pip install 'kvferry\[{extra}\]'", line)


@pytest.mark.parametrize(
    ("command", "module", "extra"),
    [
        ("serve", "zmq", "engine"),
        ("serve", "xxhash", "engine"),
        ("serve", "starlette", "engine"),
        ("serve", "uvicorn", "engine"),
        ("serve", "aiohttp", "engine"),
        ("serve", "prometheus_client", "engine"),
        ("serve", "torch", "engine"),
        ("serve", "transformers", "engine"),
        ("route", "starlette", "router"),
        ("route", "uvicorn", "router"),
        ("route", "prometheus_client", "router"),
        ("route", "uvloop", "router"),
        ("route", "httptools", "router"),
        ("route", "opentelemetry", "otel"),
    ],
)
@pytest.mark.slow
def test_each_library_alone_is_told_of(tmp_path, command, module, extra):
    options = ("--model", str(tmp_path)) if command == "serve" else ("--otel", "--decode", "http://127.0.0.1:1")
    done = run(tmp_path, command, "--port", "0", *options, hidden=(module,))
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert f"the Python package {module} is not installed: pip install 'kvferry[{extra}]'" in line


@pytest.mark.slow
def test_a_transport_that_is_asked_for_by_name_names_its_extra(tmp_path):
    options = ("--transport", "nixl", "--port", "0")
    done = run(tmp_path, "serve", *options, hidden=("nixl", "nixl_cu12", "nixl_cu13"))
    assert done.returncode == 2
    (line,) = (line for line in done.stderr.splitlines() if line.startswith("error"))
    assert line.startswith("error: NIXL is not installed: pip install 'kvferry[nixl]'")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("command", ["serve", "up"])
def test_in_an_environment_without_an_engine_it_says_what_goes_into_that_of_the_engine(tmp_path, command, engine):
    hidden = [module for module in MODULES if module not in extras.EXTRAS["router"]] + [engine]
    done = run(tmp_path, command, "--engine", engine, hidden=hidden)
    assert done.returncode == 2
    assert f"pip install 'kvferry[{SERVER_EXTRAS}]'" in done.stderr


@pytest.mark.parametrize(
    ("module", "more"),
    [
        ("kvferry", ("typer", "rich", "jinja2")),
        ("kvferry.plan", ("typer", "rich", "jinja2")),
        ("kvferry.catalog", ("typer", "rich", "jinja2")),
        ("kvferry.agent", ("typer", "rich", "jinja2")),
        ("kvferry.cli.main", ()),
    ],
)
def test_nothing_but_base_libraries_is_needed_to_load(tmp_path, module, more):
    (tmp_path / "sitecustomize.py").write_text(HIDE.format(hidden=(*MODULES, *more)))
    environment = os.environ | {"PYTHONPATH": import_path(tmp_path)}
    subprocess.run([sys.executable, "-c", f"import {module}"], env=environment, check=True, timeout=60)


def test_the_command_line_without_extras(tmp_path):
    assert run(tmp_path, "--version").stdout.startswith("kvferry ")
    assert run(tmp_path, "--help").returncode == 0
    page = tmp_path / "plan.html"
    done = run(
        tmp_path, *["plan", "--model", "llama-3.3-70b", "--prefill", "tp=4", "--decode", "tp=2", "--html"], str(page)
    )
    assert (done.returncode, page.exists()) == (0, True), done.stderr


def test_doctor_says_what_is_missing_and_tries_the_rest(tmp_path):
    done = run(tmp_path, "doctor", "--json")
    report = json.loads(done.stdout)
    facts = {fact["name"]: fact["value"] for fact in report["facts"] if fact["section"] == "extras"}
    assert facts.keys() == extras.EXTRAS.keys()
    rows = {row["transport"]: row["error"] for row in report["trials"]["loopback"]["transports"]}
    assert rows["tcp"] == ""
    assert "kvferry[nixl]" in rows["nixl"]


def test_only_in_a_checkout_the_command_is_also_that_of_a_checkout(monkeypatch):
    monkeypatch.setattr(extras, "_is_editable", lambda: False)
    assert extras.how_to_install("nixl") == "pip install 'kvferry[nixl]'"


def test_a_module_of_nobodys_extra_is_left_alone():
    assert extras.missing_extra(ModuleNotFoundError("no einops", name="einops"), "engine") is None


def test_the_table_says_what_the_package_says():
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for extra, modules in extras.EXTRAS.items():
        names = {re.split(r"[<>=\[]", each)[0] for each in declared[extra]} - {"kvferry"}
        included = {name for each in declared[extra] for name in re.findall(r"kvferry\[(.*)\]", each)}
        assert set(",".join(included).split(",")) - {""} <= set(extras.INCLUDED.get(extra, ()))
        missing = {DISTRIBUTIONS.get(module, module) for module in modules} - names
        assert not missing, f"{extra} does not bring {missing}"
