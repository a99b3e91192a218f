"""Recorded loads: one JSON object per line, with the keys of Mooncake's traces. Pure.

`{"timestamp": 1200, "input_length": 6755, "output_length": 500, "hash_ids": [0, 1, 2]}`: milliseconds, tokens, and,
if given, a name for every 512 tokens of the prompt; prompts that share names begin alike.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from kvferry.bench.load.prompts import Piece, Prompt
from kvferry.bench.load.workload import PlannedRequest
from kvferry.errors import ConfigurationError

BLOCK_TOKENS = 512
MAX_TOKENS = 10_000_000


class Line(msgspec.Struct, frozen=True):
    """One line; keys that it does not have are ignored."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...] = ()


def read_trace(lines: Iterable[str], speed: float = 1.0) -> tuple[PlannedRequest, ...]:
    """The requests in the order of their arrival, the first at 0; `speed` 2 lets them come twice as fast.

    Raises ConfigurationError naming the line.
    """
    if not speed > 0:
        raise ConfigurationError("--trace-speed must be positive", found=str(speed), expected="such as 1 or 2.5")
    numbered = ((number, text) for number, text in enumerate(lines, 1) if text.strip())
    read = sorted(((_line(number, text), number) for number, text in numbered), key=lambda pair: pair[0].timestamp)
    if not read:
        raise ConfigurationError("the trace is empty", expected="one JSON object per line")
    first_ms = read[0][0].timestamp
    return tuple(
        PlannedRequest((line.timestamp - first_ms) / 1000 / speed, _prompt(line, number), line.output_length)
        for line, number in read
    )


def _line(number: int, text: str) -> Line:
    try:
        line = msgspec.json.decode(text, type=Line)
    except (msgspec.DecodeError, UnicodeEncodeError) as error:
        raise _wrong(number, str(error)) from None
    if not (1 <= line.input_length <= MAX_TOKENS and 1 <= line.output_length <= MAX_TOKENS and line.timestamp >= 0):
        raise _wrong(number, text.strip())
    return line


def _wrong(number: int, found: str) -> ConfigurationError:
    return ConfigurationError(
        f"invalid line {number} of the trace",
        found=found,
        expected=f"timestamp (ms, not negative), input_length and output_length (tokens, 1 to {MAX_TOKENS})",
        hint='such as {"timestamp": 1200, "input_length": 6755, "output_length": 500, "hash_ids": [0, 1]}',
    )


def _prompt(line: Line, number: int) -> Prompt:
    pieces, left = [], line.input_length
    for hash_id in line.hash_ids:
        if left > 0:
            pieces.append(Piece(f"hash/{hash_id}", min(left, BLOCK_TOKENS)))
            left -= BLOCK_TOKENS
    if left > 0:
        pieces.append(Piece(f"line/{number}", left))
    return Prompt(tuple(pieces))
