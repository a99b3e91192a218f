"""The option `--engine`: its checks, and what follows from it for other options."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Final

import typer

from kvferry.cli.options import is_given, option_of, passed_options
from kvferry.errors import ConfigurationError
from kvferry.extras import how_to_install

SERVER_EXTRAS: Final = "agent,router,nixl"
"""What kvferry needs in the environment of another engine. Not `engine`: that pins a version of transformers."""


@dataclass(frozen=True, slots=True)
class OtherEngine:
    """An engine of another project, in whose environment kvferry is installed; `server` is what starts it."""

    name: str
    version: str
    server: str


OTHER_ENGINES: Final = {
    "vllm": OtherEngine("vLLM", "0.29 to 0.33", "vllm serve"),
    "sglang": OtherEngine("SGLang", "0.5.21 to 0.5.23", "sglang.launch_server"),
}
"""The engines by what `--engine` takes, which is the name of the package as well."""


def check_engine(engine: str, context: typer.Context) -> None:
    """Raises ConfigurationError for an unknown engine, one that is not installed, and arguments that none would get."""
    if engine not in ("transformers", *OTHER_ENGINES):
        expected = f"--engine transformers, {' or '.join(OTHER_ENGINES)}"
        raise ConfigurationError("unknown engine", found=engine, expected=expected)
    if engine in OTHER_ENGINES:
        check_installed(engine)
    elif context.args:
        raise ConfigurationError(
            "unexpected arguments",
            found=" ".join(context.args),
            expected="options only, or another --engine with its own options after --",
            hint=f"--model {context.args[0]}" if _may_be_a_model(context) else "",
        )


def check_installed(engine: str) -> None:
    """Raises ConfigurationError where the package of another engine is not installed."""
    found = find_spec(engine)
    # A folder of its name in the working directory has no origin.
    if found is None or found.origin is None:
        other = OTHER_ENGINES[engine]
        raise ConfigurationError(
            f"{other.name} is not installed here",
            found=sys.executable,
            expected=f"an environment with {engine} {other.version}",
            hint=f"install kvferry into {other.name}'s environment: {how_to_install(SERVER_EXTRAS)}",
        )


def extras_of(engine: str) -> str:
    """What has to be installed for this engine."""
    return SERVER_EXTRAS if engine in OTHER_ENGINES else "engine"


def refuse_options(engine: str, context: typer.Context, *names: str) -> None:
    """Raises ConfigurationError for the first of these options that was given: the other engine has its own."""
    given = next((name for name in names if is_given(context, name)), "")
    if given:
        other = OTHER_ENGINES[engine]
        raise ConfigurationError(
            f"this option does not apply to {other.name}",
            found=option_of(given),
            expected=f"the option of {other.name} itself",
            hint=f"pass options of {other.server} after --",
        )


def check_passed(arguments: Sequence[str], taken: Mapping[str, str]) -> None:
    """Raises ConfigurationError for an option behind `--` that kvferry gives the engine itself: it would count instead
    of ours. `taken` says what to use in its place."""
    for name in passed_options(arguments):
        # Both take the beginning of an option for it; vLLM takes `--option.key` for one key of an option that is JSON.
        given = name.partition(".")[0]
        if instead := [taken[option] for option in taken if len(given) > len("--") and option.startswith(given)]:
            raise ConfigurationError("kvferry does not pass this option on", found=name, expected=instead[0])


def left_to_engine(context: typer.Context, *names: str) -> dict[str, Any]:
    """0 for each of these options that was not given: the other engine's own default then applies."""
    return {name: 0 for name in names if not is_given(context, name)}


def _may_be_a_model(context: typer.Context) -> bool:
    return context.info_name == "serve" and not context.args[0].startswith("-")
