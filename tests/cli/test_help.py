"""`--help`: what most people need comes first."""

import re

import pytest
from typer.testing import CliRunner

from kvferry.cli.main import app


@pytest.mark.parametrize("command", ["serve", "route", "up"])
def test_ten_options_at_most_come_first_and_the_others_are_advanced(command):
    shown = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "80", "TERM": "dumb"}).output
    first, *others = shown.split("╭─ ")[1:]
    options = set(re.findall(r"^│ (--[a-z-]+)", first, re.MULTILINE))
    assert first.startswith("Options")
    assert {"--port"} <= options
    assert len(options - {"--help", "--json"}) <= 10
    assert len(others) > 1
    assert all(panel.startswith("Advanced: ") for panel in others)
