"""Numbers, and the spans of an axis, as a person reads them."""

from __future__ import annotations

TIMES = "\N{MULTIPLICATION SIGN}"


def format_span(axis: str, first: int, last: int) -> str:
    """`heads 0-1`, `layer 3`: both ends are held."""
    return f"{axis.replace('.', ' ')} {first}" if last - first == 1 else f"{_many(axis)} {first}–{last - 1}"  # noqa: RUF001


def format_count_of(number: int, axis: str) -> str:
    """`16 tokens`, `1 head`, `128 dim`."""
    return f"{number:,} {axis.replace('.', ' ') if number == 1 else _many(axis)}"


def _many(axis: str) -> str:
    """The plural of an axis; one that is named after its cache group too is `group.axis`."""
    words = axis.replace(".", " ")
    return words + "s" if axis.rsplit(".", 1)[-1] in ("token", "head", "channel", "layer", "group", "state") else words


def format_bytes(num_bytes: float) -> str:
    """Binary units, three digits."""
    size, unit = float(num_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if abs(size) < 1000 or (unit == "B" and abs(size) < 1024):
            break
        size, unit = size / 1024, larger
    return f"{_digits(size)} {unit}"


def format_seconds(seconds: float) -> str:
    """The largest unit with a digit before the point."""
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if seconds * factor >= 1 or unit == "µs":
            return f"{_digits(seconds * factor)} {unit}"
    return ""


def format_count(number: float) -> str:
    """Thousands apart; millions in words, since nobody reads their digits."""
    for unit, factor in (("billion", 1e9), ("million", 1e6)):
        if number >= factor:
            return f"{_digits(number / factor)} {unit}"
    return f"{number:,.0f}"


def _digits(number: float) -> str:
    if number == int(number) and number < 1000:
        return f"{number:.0f}"
    return f"{number:.2f}" if number < 10 else f"{number:.1f}" if number < 100 else f"{number:,.0f}"
