"""The documents say what is so: their tables, names and commands are checked against the code."""

import ast
import hashlib
import html
import re
from pathlib import Path

import pytest
from docs_structure import PAGE, SOURCE, page

from kvferry import catalog
from kvferry.plan.description.describe import EngineShape, describe
from kvferry.plan.description.layout import Axis, State
from kvferry.plan.description.model import CacheModel, Kept, LayerCache, latent
from kvferry.plan.description.tokens import TokenRange
from kvferry.plan.programs.program import bind
from kvferry.plan.programs.request import copies_for
from kvferry.plan.routing.route import route
from kvferry.session.slot import SLOT_TABLE
from kvferry.session.source.lease import LEASE_TABLE
from kvferry.session.state_machine import TransitionTable
from kvferry.session.target.peers.peer import PEER_TABLE
from kvferry.session.target.reads.fetch import READ_TABLE

ROOT = Path(__file__).parents[1]
DESIGN = ROOT / "docs/design"


@pytest.mark.parametrize(
    "table",
    [LEASE_TABLE, READ_TABLE, SLOT_TABLE, PEER_TABLE],
    ids=["lease", "read", "slot", "peer"],
)
def test_the_transitions_of_the_page_are_those_of_the_code(table):
    assert f"\n\n{markdown(table)}\n" in (DESIGN / "sessions.md").read_text()


def markdown(table: TransitionTable) -> str:
    """A row for each state that can be left, a column for each event, and the next state where they meet."""
    states, events = dict.fromkeys(state for state, _ in table), dict.fromkeys(event for _, event in table)
    rows = [["", *events], ["---"] * (len(events) + 1)]
    rows += [[f"**{state}**", *(table.get((state, event), "") for event in events)] for state in states]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def test_every_test_that_the_design_names_exists():
    named = set(re.findall(r"`(test_i\w+)`", (DESIGN / "plan.md").read_text()))
    written = "".join((ROOT / f"tests/plan/test_{name}.py").read_text() for name in ("invariants", "staged"))
    assert named == set(re.findall(r"def (test_i\d\w+)", written))


def test_the_page_of_the_packages_is_what_their_docstrings_say():
    assert PAGE.read_text() == page(), "write it again: python tests/docs_structure.py"


def test_every_package_says_what_enters_and_what_leaves():
    """But for the folders of commands: options enter, words leave."""
    packages = {path.parent.relative_to(SOURCE).as_posix(): path for path in SOURCE.rglob("*/__init__.py")}
    silent = [
        name
        for name, path in packages.items()
        if not re.search(r"\n\nEnters: .*Leaves: ", ast.get_docstring(ast.parse(path.read_text())) or "", re.DOTALL)
    ]
    assert [name for name in sorted(silent) if not name.startswith("cli/") and name != "."] == []


def test_every_folder_that_the_page_of_the_packages_names_exists():
    named = set(re.findall(r"`([a-z_]+(?:/[a-z_]+)*)`", PAGE.read_text()))
    folders = {name for name in named if "/" in name}
    assert len(folders) > 40
    assert [name for name in sorted(folders) if not (ROOT / "src/kvferry" / name).is_dir()] == []


def kinds_of_cache():
    """The rows of the design's table that name a model: its states, its cache group, the model and options."""
    row = r"^\| ([^|]+) \| (`[^|]+) \| `([\w-]+)` \| `([\w.-]+)`([^|]*) \|$"
    return re.findall(row, (DESIGN / "plan.md").read_text(), re.MULTILINE)


def test_the_table_of_kinds_was_found():
    assert len(kinds_of_cache()) == 9


@pytest.mark.parametrize(("kind", "states", "group", "model", "options"), kinds_of_cache())
def test_the_kinds_of_cache_are_as_the_catalog_makes_them(kind, states, group, model, options):
    cache_dtype = re.search(r"--cache-dtype (\w+)", options)
    cache = catalog.read(model, catalog.Options(cache_dtype[1] if cache_dtype else "auto", draft_layers=False)).cache
    layer = next(layer for layer in cache.layers if layer.group == group)
    found = {each.state.name.split(".", 3)[3]: each for each in layer.kept}
    drawn = {}
    for names, axes in re.findall(r"(`[\w.]+`(?:, `[\w.]+`)*) \(([^)]+)\)", states):
        drawn |= dict.fromkeys(re.findall(r"[\w.]+", names), axes)
    for name, axes in drawn.items():
        state, divided = found[name].state, re.findall(r"\*\*(\w+)\*\*", axes)
        assert [axis.name for axis in state.axes] == re.findall(r"\w+", axes)
        assert [found[name].divided_axis] == (divided or [""])
        assert state.per_token == ("fixed size" not in kind)
        assert bool(state.window_tokens) == ("window_tokens" in states)
        assert bool(state.chunk_tokens) == ("chunk_tokens" in states)
    assert set(drawn) == set(found) or cache_dtype
    assert not cache_dtype or [axis.extent for axis in found["latent"].state.axes] == [656]


def rows(sources, targets, source_rank, tables, tokens):
    """(source offset, target offset, length) of what moves to target rank 0."""
    source, target = sources[source_rank], targets[0]
    copies = copies_for(bind(route(sources, targets).between(source_rank, 0), source, target), *tables, [tokens])
    columns = copies.source - source.regions[0].address, copies.target - target.regions[0].address, copies.length
    return set(zip(*(column.tolist() for column in columns), strict=True))


def drawn_rows(example):
    """The numbers in the table of one of the design's examples."""
    text = (DESIGN / "examples.md").read_text().partition(f"**{example}. ")[2]
    table = re.search(r"(^\|.*\n)+", text, re.MULTILINE)[0]
    return [tuple(map(int, re.findall(r"(?<=\| )\d+(?= \|)", line))) for line in table.splitlines()[2:]]


def shape(block_tokens, num_blocks, **more):
    return EngineShape(1, 1, block_tokens, num_blocks, "token-major", **more)


def test_example_5_two_token_shares_to_one_rank():
    model = latent(num_layers=1, dim=1, dtype="float16", item_bytes=2)
    sources = describe(model, shape(2, 4, context_parallel=2, run_tokens=2), 1 << 50)
    targets = describe(model, shape(4, 2), 1 << 51)
    found = [rows(sources, targets, rank, ([[3, 1]], [[1, 0]]), TokenRange(0, 7)) for rank in (0, 1)]
    assert found == [{(12, 8, 4), (4, 0, 4)}, {(12, 12, 4), (4, 4, 2)}]
    assert sorted(drawn_rows(5)) == sorted((rank, *row) for rank in (0, 1) for row in found[rank])


def test_example_6_a_sliding_window():
    state = State("s", "float16", 2, (Axis("dim", 1),), per_token=True, window_tokens=4)
    model = CacheModel(1, (LayerCache(0, "window-4", (Kept(state, ""),)),))
    sources, targets = describe(model, shape(4, 4), 1 << 50), describe(model, shape(2, 6), 1 << 51)
    found = rows(sources, targets, 0, ([[9, 2, 0]], [[-1, -1, -1, 4, 1]]), TokenRange(0, 9))
    assert found == {(20, 16, 4), (0, 4, 2)} == set(drawn_rows(6))


@pytest.mark.parametrize(
    "document", sorted(ROOT.glob("*.md")) + sorted(ROOT.glob("docs/**/*.md")), ids=lambda p: p.name
)
def test_links_between_documents_lead_somewhere(document):
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", document.read_text()):
        assert (document.parent / target).exists(), target


def test_every_guarantee_names_tests_that_exist():
    text = (ROOT / "docs" / "guarantees.md").read_text(encoding="utf-8")
    promises = re.split(r"\n(?=\*\*)", text)[1:]
    assert all("<summary>Shown by</summary>" in promise for promise in promises)
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text)
    assert len(named) > len(promises)
    missing = [f"{path}::{name}" for path, name in named if f"def {name}(" not in (ROOT / path).read_text("utf-8")]
    assert missing == []


def test_the_picture_of_the_figures_is_of_the_figures_that_are_kept():
    kept = hashlib.sha256((ROOT / "benchmarks/results/mixed_tp.json").read_bytes()).hexdigest()
    assert kept in (ROOT / "docs/images/mixed_tp.svg").read_text(), "draw it again: python benchmarks/draw_mixed_tp.py"


@pytest.mark.parametrize("page", ["docs/images/up.svg", "docs/start.md"])
def test_the_table_that_is_shown_has_rows_of_the_command(page):
    """The picture is drawn again by `python tests/docs_recording.py`."""
    text = html.unescape((ROOT / page).read_text()).replace("\u00a0", " ")
    shown = re.findall(r"(?:^|>)│ +(\w[\w ]*?) +│", text, re.MULTILINE)
    assert "Proved: the decode engine has computed" in text
    written = (ROOT / "src/kvferry/cli/up/job.py").read_text()
    phases = {"queue", "handshake", "claim", "wire", "verify"}
    assert len(shown) > 6
    assert [row for row in shown if row not in phases and f'"{row}"' not in written] == []


def test_every_example_has_a_row_in_the_page_of_examples():
    named = re.findall(r"^\| `(\w+\.py)` \|", (ROOT / "docs/examples.md").read_text(), re.MULTILINE)
    assert sorted(named) == sorted(path.name for path in (ROOT / "examples").glob("*.py"))
