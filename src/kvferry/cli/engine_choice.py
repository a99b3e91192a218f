"""The option `--engine`: its checks, and what follows from it for other options."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from typing import Any

import typer

from kvferry.cli.options import is_given
from kvferry.errors import ConfigurationError
from kvferry.extras import how_to_install

VLLM_EXTRAS = "agent,router,nixl"
"""What kvferry needs in vLLM's environment. Not `engine`: that pins a version of transformers."""


def check_engine(engine: str, context: typer.Context) -> None:
    """Raises ConfigurationError for an unknown engine, and for arguments that no engine would get."""
    if engine not in ("transformers", "vllm"):
        raise ConfigurationError("unknown engine", found=engine, expected="--engine transformers or --engine vllm")
    if engine != "vllm" and context.args:
        found = " ".join(context.args)
        raise ConfigurationError(
            "unexpected arguments",
            found=found,
            expected="options only, or --engine vllm with vLLM's own options after --",
            hint=f"--model {context.args[0]}" if _may_be_a_model(context) else "",
        )


def check_vllm() -> None:
    """Raises ConfigurationError where vLLM is not installed."""
    if find_spec("vllm") is None:
        raise ConfigurationError(
            "vLLM is not installed here",
            found=sys.executable,
            expected="an environment with vllm 0.32",
            hint=f"install kvferry into vLLM's environment: {how_to_install(VLLM_EXTRAS)}",
        )


def extras_of(engine: str) -> str:
    """What has to be installed for this engine."""
    return VLLM_EXTRAS if engine == "vllm" else "engine"


def _may_be_a_model(context: typer.Context) -> bool:
    return context.info_name == "serve" and not context.args[0].startswith("-")


def left_to_vllm(context: typer.Context, *names: str) -> dict[str, Any]:
    """0 for each of these options that was not given: vLLM's own default then applies."""
    return {name: 0 for name in names if not is_given(context, name)}
