"""The settings of a fleet that `kvferry up --on ray` starts: as many engines as it is told, and no autoscaling."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvferry.cli.ray.settings import RaySettings, settings_from
from kvferry.cli.up.command import UpOptions
from kvferry.cli.up.fleet import FleetOptions, sizes_of
from kvferry.errors import ConfigurationError

DRAIN_S = 10.0


def settings_of(options: UpOptions, fleet: FleetOptions, words: Sequence[str]) -> RaySettings:
    """`words` are options of `kvferry serve` that all engines get. Raises ConfigurationError."""
    resources = _resources(options.place.resources)
    blocks = {"prefill": fleet.prefill_block_tokens, "decode": fleet.decode_block_tokens}
    numbers = {"prefill": options.prefill, "decode": options.decode}
    roles: dict[str, Any] = {
        side: {
            "min_replicas": numbers[side],
            "max_replicas": numbers[side],
            "resources": resources,
            "extra_args": sizes_of(blocks[side], fleet.cache_tokens),
        }
        for side in numbers
    }
    whole = {
        # Not the folder that it is here: each node finds or makes its own.
        "model": options.model,
        "engine": options.engine,
        "token_file": options.place.token_file,
        "drain_timeout_s": DRAIN_S,
        "start_timeout_s": fleet.ready_s,
        "extra_args": words,
        "engine_args": options.arguments,
    }
    return settings_from(whole | roles)


def _resources(texts: Sequence[str]) -> dict[str, float]:
    found = dict[str, float]()
    for text in texts or ("CPU=1",):
        name, _, amount = text.partition("=")
        try:
            found[name] = float(amount if name.strip() else "")
        except ValueError:
            raise ConfigurationError("invalid --resources", found=text, expected="such as GPU=1") from None
    return found
