"""A fleet of kvferry's own engine on the device that is checked, with a tiny model."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from kvferry.cli.models import TINY, resolve
from kvferry.cli.up.fleet import Fleet, FleetOptions
from kvferry.staging.device.table import torch_name

# Unequal blocks, so that rows are divided.
PREFILL_BLOCK_TOKENS: Final = 16
DECODE_BLOCK_TOKENS: Final = 32
CACHE_TOKENS: Final = 16384
READY_S: Final = 100.0


@contextmanager
def fleet_on(kind: str, serve_words: tuple[str, ...] = ()) -> Iterator[Fleet]:
    """A prefill and a decode engine that compute there, and a router; all have ended when this does.

    Raises ConfigurationError when one of them cannot start.
    """
    path, name = resolve(TINY)
    options = FleetOptions(
        num_prefill=1,
        num_decode=1,
        engine_arguments=("--model", path, "--served-name", name, "--device", torch_name(kind), *serve_words),
        prefill_block_tokens=PREFILL_BLOCK_TOKENS,
        decode_block_tokens=DECODE_BLOCK_TOKENS,
        cache_tokens=CACHE_TOKENS,
        port=0,
        ready_s=READY_S,
    )
    with tempfile.TemporaryDirectory(prefix="kvferry-qualify-") as logs, Fleet(options, Path(logs)) as fleet:
        fleet.start()
        yield fleet
