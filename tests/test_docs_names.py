"""Names in the documents' text: modules, files and options are there."""

from __future__ import annotations

import re

import pytest
from docs_pages import ROOT, all_options, pages, prose

SOURCE = ROOT / "src"
# Groups of entry points, and what traces call things: with a dot, but not Python's.
NOT_PYTHON = {
    "kvferry.policies",
    "kvferry.devices",
    "kvferry.request",
    "kvferry.prefill",
    "kvferry.decode",
    "kvferry.outcome",
}
# Options of vLLM, SGLang, llm-d, pip, pytest, Helm and Docker that are named on other pages than vLLM's.
OF_OTHERS = {
    *(
        "--disable-hybrid-kv-cache-manager",
        "--disaggregation-decode-enable-radix-cache",
        "--gpu-memory-utilization",
        "--served-model-name",
        "--kv-cache-memory-bytes",
        "--kv-transfer-config",
        "--max-num-batched-tokens",
    ),
    *(
        "--enable-memory-saver",
        "--enable-metrics",
        "--middleware",
        "--enforce-eager",
        "--enable-auto-tool-choice",
        "--tool-call-parser",
        "--shutdown-timeout",
        "--max-model-len",
        "--tensor-parallel-size",
        "--disaggregation-transfer-backend",
        "--mem-fraction-static",
        "--disable-log-stats",
        "--prefill-max-retries",
        "--save-result",
        "--help",
        "--membind",
        "--with-ze",
        "--include_path",
        "--num_fewshot",
        "--apply_chat_template",
        "--config",
        "--no-deps",
        "--example-proxy",
        "--ipc",
        "--pid",
        "--target",
        "--wait",
        "--head",
        "--address",
        "--node-ip-address",
    ),
}

MODULES = {path.name for folder in ("src", "tests", "benchmarks", "examples") for path in (ROOT / folder).rglob("*.py")}


def exists(name):
    """Whether `kvferry.a.b.c` is a module, or something that the module before it names."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        path = SOURCE.joinpath(*parts[:count])
        file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        if file.exists():
            return count == len(parts) or re.search(rf"\b{re.escape(parts[count])}\b", file.read_text()) is not None
    return False


def test_what_does_not_exist_would_be_found():
    assert exists("kvferry.errors")
    assert exists("kvferry.errors.FerryError")
    assert not exists("kvferry.nothing")
    assert not exists("kvferry.errors.Nothing")


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_every_name_of_python_exists(page):
    named = set(re.findall(r"`(kvferry(?:\.\w+)+)`", page.read_text())) - NOT_PYTHON
    assert [name for name in sorted(named) if not exists(name)] == []


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_every_file_that_is_named_exists(page):
    named = set(re.findall(r"`((?:\w+/)+[\w.]+\.\w+)(?:::\w+)?`", page.read_text()))
    places = (ROOT, SOURCE, SOURCE / "kvferry", ROOT / "tests", ROOT / "benchmarks")
    assert [file for file in sorted(named) if not any((place / file).exists() for place in places)] == []


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_every_module_that_is_named_by_its_file_exists(page):
    """A decision that another one supersedes names what was there."""
    if "Superseded by" in page.read_text():
        return
    named = set(re.findall(r"`(\w+\.py)`", page.read_text()))
    assert sorted(named - MODULES) == []


def codes(page):
    """The pieces of code in the text; of engines' pages only our own commands, for most options there are theirs."""
    found = re.findall(r"`([^`]+)`", prose(page))
    return [code for code in found if re.match("kvferry [a-z]", code) or not page.name.startswith(("vllm", "sglang"))]


def test_every_option_in_the_text_is_one():
    """Decisions also name what was not taken."""
    ours_to_check = [page for page in pages() if "decisions" not in page.parts]
    options = re.compile(r"(?<![\w-])--[a-z][a-z_-]+")
    named = {option for page in ours_to_check for code in codes(page) for option in options.findall(code)}
    scripts = "".join(path.read_text() for path in (ROOT / "benchmarks").rglob("*.py"))
    ours = all_options() | set(re.findall(r"\"(--[a-z-]+)\"", scripts))
    assert len(named & ours) > 50
    assert sorted(named - ours - OF_OTHERS) == []
