"""The documents say what is so: their diagrams, names and commands are checked against the code."""

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvferry.cli.main import app
from kvferry.session.fetch import READ_TABLE
from kvferry.session.handshake import PEER_TABLE
from kvferry.session.lease import LEASE_TABLE
from kvferry.session.machine import diagram

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("table", [LEASE_TABLE, READ_TABLE, PEER_TABLE], ids=["lease", "read", "peer"])
def test_the_diagrams_are_those_of_the_tables(table):
    assert diagram(table) in (ROOT / "docs/design.md").read_text()


def test_every_test_that_the_design_names_exists():
    named = set(re.findall(r"`(test_i\w+)`", (ROOT / "docs/design.md").read_text()))
    assert named == set(re.findall(r"def (test_i\w+)", (ROOT / "tests/plan/test_invariants.py").read_text()))


def test_the_tree_in_the_design_is_the_tree():
    drawn = set(re.findall(r"^  (\w+)/ ", (ROOT / "docs/design.md").read_text(), re.MULTILINE))
    assert drawn == {path.parent.name for path in (ROOT / "src/kvferry").glob("*/__init__.py")}


@pytest.mark.parametrize(
    "document", sorted(ROOT.glob("*.md")) + sorted(ROOT.glob("docs/**/*.md")), ids=lambda p: p.name
)
def test_links_between_documents_lead_somewhere(document):
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", document.read_text()):
        assert (document.parent / target).exists(), target


def test_every_command_that_the_readme_shows_has_these_options():
    text = (ROOT / "README.md").read_text()
    for line in re.findall(r"^kvferry (\w+)(.*)$", text, re.MULTILINE):
        command, options = line[0], re.findall(r"--[a-z-]+", line[1])
        shown = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "200", "TERM": "dumb"}).output
        for option in options:
            assert option in shown, f"kvferry {command} has no {option}"
