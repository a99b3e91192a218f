"""The page of a simulated fleet in a real browser: nothing sticks out, and no text is cut."""

import re

import pytest
from test_page_in_browser import look, pytestmark  # noqa: F401
from typer.testing import CliRunner

from kvferry.cli.main import app

LONG = "link of rack 1 at 10% from 12 to 14"


@pytest.mark.parametrize("width", [1280, 800])
def test_nothing_sticks_out_and_no_label_is_cut(tmp_path, width):
    page = tmp_path / "run.html"
    words = [
        "--prefill",
        "2",
        "--decode",
        "4",
        "--per-rack",
        "3",
        "--rate",
        "4",
        "--duration",
        "20",
        "--page",
        str(page),
    ]
    incidents = ["--incident", "rack 1 dies from 11 to 13", "--incident", LONG, "--incident", "rollout from 15"]
    result = CliRunner().invoke(app, ["simulate", "fleet", *words, *incidents])
    assert result.exit_code == 0, result.output
    dom = look(tmp_path, page.read_text(), width)
    assert re.search(r"<title>(\{.*?\})</title>", dom).group(1) == '{"wide":0,"out":[],"cut":[]}'
