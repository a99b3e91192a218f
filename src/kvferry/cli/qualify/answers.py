"""Whether two engines on the device, one for prefill and one for decode, answer as one alone does."""

from __future__ import annotations

import asyncio
import secrets
from typing import Final

from kvferry.bench.accuracy.client import Server
from kvferry.bench.accuracy.items import shipped_items
from kvferry.bench.accuracy.run import Extent, measure
from kvferry.bench.accuracy.verdict import Limits, faults
from kvferry.cli.qualify.engines import fleet_on
from kvferry.cli.up.fleet import Fleet
from kvferry.qualify.outcome import Outcome, failed, passed

NAME: Final = "answers"
NUM_PROMPTS: Final = 24
EXTENT: Final = Extent(answer_tokens=16, score_tokens=0)
AT_ONCE: Final = 4


def run(kind: str) -> Outcome:
    """Check a fleet on this kind of device, with all that the machine offers. Raises what `fleet_on` does."""
    with fleet_on(kind) as fleet:
        return check(fleet)


def check(fleet: Fleet) -> Outcome:
    """Compare tokens and log-probabilities of the split with those of the decode engine alone, asked one by one and
    several at once."""
    salt = f"qualify-{secrets.token_hex(4)}"
    whole = Server(fleet.decode_urls[0], fleet.model, at_once=AT_ONCE, salt=f"{salt}-whole")
    split = Server(fleet.url, fleet.model, at_once=AT_ONCE, salt=f"{salt}-split")
    items = shipped_items()
    some = tuple(items[number * len(items) // NUM_PROMPTS] for number in range(NUM_PROMPTS))
    measured = asyncio.run(measure(whole, split, some, EXTENT, lambda *_: lambda: None, with_control=True))
    if wrong := faults(measured, Limits()):
        return failed(NAME, "; ".join(wrong))
    found, left_out = measured.split, measured.left_out
    too_long = f"; {len(left_out)} of {len(some)} prompts do not fit into the engine's cache" if left_out else ""
    return passed(
        NAME,
        f"{found.num_equal} of {found.num_compared} answers are equal, {found.num_split} went through a split; "
        f"log-probabilities differ by {found.mean_difference:.2g} on average{too_long}",
    )
