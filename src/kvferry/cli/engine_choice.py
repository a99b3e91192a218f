"""What of a command line was typed: which engine it is for, and what that engine has to be told."""

from __future__ import annotations

import shlex

import typer

from kvferry.errors import ConfigurationError

__all__ = ["check_engine", "check_unused", "is_given", "size", "typed_words"]


def check_engine(engine: str, context: typer.Context) -> None:
    """Raises ConfigurationError for an engine that we do not have, and for arguments that none would get."""
    if engine not in ("transformers", "vllm"):
        raise ConfigurationError("no such engine", found=engine, expected="--engine transformers or --engine vllm")
    if engine != "vllm" and context.args:
        found = " ".join(context.args)
        raise ConfigurationError("these arguments belong to no engine", found=found, expected="--engine vllm -- …")


def check_unused(context: typer.Context, names: tuple[str, ...], beside: str) -> None:
    """Raises ConfigurationError for an option that would do nothing beside another."""
    given = [f"--{name.replace('_', '-')}" for name in names if is_given(context, name)]
    if given:
        hint = "leave one of them out"
        raise ConfigurationError(f"this has no effect beside {beside}", found=", ".join(given), hint=hint)


def size(context: typer.Context, name: str, engine: str) -> int:
    """A number of the command line; 0, which leaves it to vLLM, where that is the engine and none was given."""
    return int(context.params[name]) if engine != "vllm" or is_given(context, name) else 0


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
