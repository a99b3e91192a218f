"""docs/plan.md shows what `kvferry plan` prints, and names the models and keys that there are."""

from __future__ import annotations

import json
import re

import pytest
from docs_pages import DOCS, calls_of
from typer.testing import CliRunner

from kvferry import catalog
from kvferry.cli.main import app

TEXT = (DOCS / "plan.md").read_text(encoding="utf-8")


def planned(words, width):
    result = CliRunner().invoke(app, ["plan", *words], env={"COLUMNS": str(width), "TERM": "dumb"})
    assert result.exit_code == 0, result.output
    return result.stdout


def plans():
    return [words[1:] for place, words in calls_of("kvferry") if words[0] == "plan" and "plan.md" in place]


def words_after(start):
    """What the page says from there on, wherever its lines end."""
    return " ".join(TEXT.split()).partition(start)[2]


def test_the_plan_that_is_shown_is_what_the_command_prints():
    """Word by word: where lines wrap depends on the terminal."""
    shown = re.search(r"^```text\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)[1]
    assert shown.split() == planned(plans()[0], 110).split()


@pytest.mark.parametrize("words", [words for words in plans() if "131072" not in words], ids=" ".join)
def test_every_plan_can_be_made(words):
    """Save the one with 168 million rows, which takes its time."""
    assert planned(words, 110)


def test_the_keys_that_are_named_are_in_the_plan():
    of_plan, rest = words_after("`--json` prints one object.").split("Of each entry of `pairs`:")
    of_pair, of_engines = rest.partition("The costs")[0].split("Also what")
    facts = json.loads(
        planned(["--model", "qwen3-8b", "--prefill", "tp=2", "--decode", "tp=1", "--tokens", "100", "--json"], 80)
    )
    keys = re.compile(r"`(\w+)`")
    assert len(keys.findall(of_pair)) > 9
    assert set(keys.findall(of_pair)) <= facts["pairs"][0].keys()
    assert set(keys.findall(of_plan) + keys.findall(of_engines)) <= facts.keys()


def test_every_model_that_is_named_is_shipped():
    names, hub = words_after("whose config we ship:").partition("All of them:")[0].split("It also takes")
    assert len(re.findall(r"`([\w.-]+)`", names)) > 5
    assert set(re.findall(r"`([\w.-]+)`", names)) <= set(catalog.names())
    on_the_hub, without_owner, shipped = re.findall(r"`([\w./-]+)`", hub)
    assert on_the_hub in catalog.hub_names(shipped)
    assert on_the_hub.lower().endswith(f"/{without_owner}")


def test_pages_that_count_the_shipped_models_count_them_all():
    pages = (DOCS / "decisions/0006-plan-costs-and-catalog.md", DOCS.parent / "CHANGELOG.md")
    counts = [
        number
        for page in pages
        for number in re.findall(r"(\d+) (?:names are|shipped `config|models that it knows)", page.read_text("utf-8"))
    ]
    assert counts == [str(len(catalog.names()))] * 3
