"""Commands that are made of records: one declaration of an option, one place that has its value."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from kvferry.cli.options import AccessOptions, command_of, is_given
from kvferry.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class Inner:
    colour: Annotated[str, typer.Option(help="Its colour.")] = "red"

    def __post_init__(self) -> None:
        if self.colour == "none":
            raise ConfigurationError("no colour")


@dataclass(frozen=True, slots=True)
class Outer:
    size: Annotated[int, typer.Option(help="Its size.")]
    inner: Inner = field(default_factory=Inner)
    weight: Annotated[float, typer.Option(help="Its weight.")] = 1.0
    names: Annotated[list[str], typer.Option(help="Its names.")] = field(default_factory=list)
    arguments: tuple[str, ...] = ()


@pytest.fixture
def run():
    """Runs the command and returns what came of it, the record and whether the colour was given."""
    seen = []

    @command_of(Outer)
    def paint(context: typer.Context, options: Outer) -> int:
        """Paint it."""
        seen.append((options, is_given(context, "colour")))
        return len(options.names)

    app = typer.Typer()
    app.command()(paint)
    return lambda *words: (CliRunner().invoke(app, words), seen)


def test_the_fields_of_records_within_records_are_options_in_their_order(run):
    shown = run("--help")[0].output
    places = [shown.index(words) for words in ("Paint it.", "--size", "--colour", "--names")]
    assert places == sorted(places)
    assert "--arguments" not in shown
    assert run()[0].exit_code == 2


def test_a_record_has_what_was_given_and_its_defaults_and_the_exit_code_is_the_functions(run):
    result, seen = run("--size", "3", "--names", "a", "--names", "b", "--colour", "blue")
    assert (result.exit_code, seen) == (2, [(Outer(3, Inner("blue"), names=["a", "b"]), True)])
    result, seen = run("--size", "4")
    assert (result.exit_code, seen[1]) == (0, (Outer(4), False))


def test_what_a_record_refuses_is_a_message(run):
    result, seen = run("--size", "3", "--colour", "none")
    assert (result.exit_code, seen) == (2, [])
    assert "error: no colour" in result.stderr


def test_what_is_not_a_number_is_a_message(run):
    result, seen = run("--size", "3", "--weight", "nan")
    assert (result.exit_code, seen) == (2, [])
    assert "--weight" in result.stderr


def test_a_key_is_not_shown_where_options_are():
    assert "secret" not in repr(AccessOptions(["secret"]))
