"""What of a command line was typed, and what is only a default."""

from __future__ import annotations

import shlex

import typer

from kvferry.errors import ConfigurationError


def check_unused(context: typer.Context, names: tuple[str, ...], beside: str) -> None:
    """Raises ConfigurationError for an option that would do nothing beside another."""
    given = [f"--{name.replace('_', '-')}" for name in names if is_given(context, name)]
    if given:
        hint = "leave one of them out"
        raise ConfigurationError(f"these options have no effect {beside}", found=", ".join(given), hint=hint)


def is_given(context: typer.Context, name: str) -> bool:
    """Whether the command line has an option, or its default counts."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def typed_words(context: typer.Context, without: tuple[str, ...]) -> str:
    """The command line as it was typed, but for some options: what a shell would take for the same."""
    words = ["kvferry", str(context.info_name)]
    for name, value in context.params.items():
        if name not in without and is_given(context, name):
            option = f"--{name.replace('_', '-')}"
            words += [option] if value is True else [option, str(value)]
    return shlex.join(words)
