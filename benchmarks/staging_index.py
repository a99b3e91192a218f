"""What a device has to be told of the rows of one slot: row by row, as tiles found in the rows, and as those planned.

    python benchmarks/staging_index.py > benchmarks/results/staging_index.json

Prints JSON; needs no device. One slot of 8 MiB is gathered or scattered for a target of one rank from a source of four,
whose blocks have another size and lie in no order. *ms* is the processor's time from the rows to an index that can be
sent, its copy into the memory from which that is done included; medians. *cut* is the same slot without its first 37
and its last 20 rows, *noise* as many rows in no order at all, both of which are lists of rows for the mover.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from measuring import machine, say

from kvferry.plan.description.describe import FORMATS, EngineShape, describe
from kvferry.plan.description.model import attention
from kvferry.plan.description.tokens import TokenRange
from kvferry.plan.programs.copies import Copies
from kvferry.plan.programs.program import bind
from kvferry.plan.programs.tiles import Tile, plain, rows_of, tile_of
from kvferry.plan.routing.route import route
from kvferry.plan.slots.slot_plan import SlotPlan, StagedRequest
from kvferry.plan.strategy.strategies import Side, Strategy
from kvferry.staging.device.launches import MAX_ROW_BYTES, launch_of
from kvferry.staging.device.patterns import for_device, tiles_of

SLOT_BYTES = 8 << 20
# So many blocks of 16 or 24 tokens of 16 KiB each side has for this rank.
NUM_BLOCKS = 64
MODEL = attention(num_layers=32, num_heads=8, head_dim=64, dtype="float16", item_bytes=2)
SEED = 5


def slot(source_format: str, target_format: str, side: Side) -> tuple[Tile, ...]:
    """What one side copies for a whole slot of 512 tokens: 32 layers, keys and values, two heads of 128 bytes."""
    shapes = EngineShape(1, 1, 16, NUM_BLOCKS, source_format), EngineShape(4, 1, 24, NUM_BLOCKS, target_format)
    sources, targets = (describe(MODEL, shape, 1 << at) for shape, at in zip(shapes, (41, 50), strict=True))
    program = bind(route(sources, targets).between(0, 1), sources[0], targets[1])
    dice = random.Random(SEED)
    tables = [(tuple(dice.sample(range(NUM_BLOCKS), NUM_BLOCKS)),) for _ in shapes]
    request = StagedRequest(program, *tables, (TokenRange(0, 512),), Strategy.PACK, SLOT_BYTES)
    (found,) = SlotPlan(request, side).slots(0)
    return found.gather if side is Side.SOURCE else found.scatter


def cases() -> Iterator[tuple[str, tuple[Tile, ...]]]:
    planned = slot("token-major", "token-major", Side.SOURCE)
    yield "gather, token-major to token-major", planned
    whole = rows_of(planned)
    parts = [column[37:-20].copy() for column in (whole.source, whole.target, whole.length)]
    yield "the same, cut", plain(Copies(*parts, len(parts[0])))
    noise = np.random.default_rng(SEED).permutation(len(whole)).astype(np.uint64) * np.uint64(512)
    yield "the same, noise", plain(Copies(noise, whole.target, whole.length, len(whole)))
    for name in FORMATS:
        yield f"gather, {name} to head-major", slot(name, "head-major", Side.SOURCE)
        yield f"scatter, head-major to {name}", slot("head-major", name, Side.TARGET)


def prepare(tiles: Sequence[Tile], sent: np.ndarray) -> int:
    """What the mover does with tiles before anything is queued; how many bytes travel."""
    stop = 0
    for tile in tiles:
        launch_of(tile)
        columns = tile.columns()
        start, stop = stop, stop + len(columns)
        sent[start:stop] = columns
    return 8 * stop


def milliseconds(run: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return round(statistics.median(times) * 1000, 4)


def measure(name: str, tiles: Sequence[Tile], repeats: int) -> dict[str, object]:
    copies = rows_of(tiles)
    sent = np.empty(2 * len(tile_of(copies).split(MAX_ROW_BYTES).columns()), np.int64)
    ways: dict[str, Callable[[], Sequence[Tile]]] = {
        "row by row": lambda: [tile_of(copies).split(MAX_ROW_BYTES)],
        "found": lambda: tiles_of(copies),
        "planned": lambda: for_device(tiles),
    }
    found: dict[str, object] = {"case": name, "rows": len(copies), "bytes": copies.num_bytes}
    for way, make in ways.items():
        num_bytes = prepare(make(), sent)
        ms = milliseconds(lambda make=make: prepare(make(), sent), repeats)  # type: ignore[misc]
        share = round(num_bytes / copies.num_bytes, 5)
        found[way] = {"num_tiles": len(make()), "index_bytes": num_bytes, "of_payload": share, "ms": ms}
    say(f"{name}: {len(copies)} rows; {'; '.join(f'{way}: {found[way]}' for way in ways)}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=101)
    arguments = parser.parse_args()
    found = [measure(name, tiles, arguments.repeats) for name, tiles in cases()]
    print(json.dumps({"machine": machine(), "repeats": arguments.repeats, "cases": found}, indent=1))


if __name__ == "__main__":
    main()
