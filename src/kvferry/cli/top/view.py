"""One frame of `kvferry top`: figures between two readings of a router, as tables or as JSON. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from kvferry.cli.scrape import START, Reading

REQUESTS, TTFT = "kvferry_router_requests_total", "kvferry_router_time_to_first_token_seconds"
PHASES, GAPS = "kvferry_router_phase_seconds", "kvferry_router_inter_token_seconds"
TROUBLE = {
    "refused": "kvferry_router_turned_away_total",
    "without prefill": "kvferry_router_fallbacks_total",
    "retries": "kvferry_router_retries_total",
    "lost caches": "kvferry_router_lost_caches_total",
    "failed upstream requests": "kvferry_router_upstream_errors_total",
}
FAILED = "answered with 5xx"
ORDER = ("queue", "prefill", "decode_queue", "handshake", "claim", "wire", "verify", "lost", "first_decode", "decode")
BAR = 40


@dataclass(frozen=True, slots=True)
class Frame:
    """Two readings of the metrics, and what the router says of its instances at the second.

    With `START` before, the figures are totals: nobody knows over how many seconds.
    """

    before: Reading
    now: Reading
    members: dict[str, Any]

    @property
    def has_rates(self) -> bool:
        return self.before is not START


def summary(frame: Frame) -> dict[str, Any]:
    """Plain JSON: totals since the router started; rates per second, where there were two readings; times in seconds;
    null where nothing came. Tokens are of streams, without the first piece of each; the router reads no others."""
    before, now = frame.before, frame.now
    return {
        "requests": now.total(REQUESTS),
        "tokens": now.total(f"{GAPS}_count"),
        "trouble": {words: now.total(name) for words, name in TROUBLE.items()}
        | {FAILED: sum(now.total(REQUESTS, status=status) for status in _failures(now))},
        "requests_per_s": now.rate(before, REQUESTS) if frame.has_rates else None,
        "tokens_per_s": now.rate(before, f"{GAPS}_count") if frame.has_rates else None,
        "ttft_p50_s": now.percentile(before, TTFT, 0.5) or None,
        "ttft_p99_s": now.percentile(before, TTFT, 0.99) or None,
        "itl_p50_s": now.percentile(before, GAPS, 0.5) or None,
        "itl_p99_s": now.percentile(before, GAPS, 0.99) or None,
        "phases_s": {phase: now.mean(before, PHASES, phase=phase) or None for phase in _phases(now)},
        "trouble_per_s": {words: now.rate(before, name) for words, name in TROUBLE.items()}
        | {FAILED: sum(now.rate(before, REQUESTS, status=status) for status in _failures(now))}
        if frame.has_rates
        else None,
        **frame.members,
    }


def view(frame: Frame) -> Group:
    """What a person sees: a line, the phases, the instances, and what is out."""
    found = summary(frame)
    titles = "\nmean time by phase (answers that are not streamed count as decode)", "\ninstances"
    return Group(_line(found), titles[0], _phase_table(found), titles[1], _member_table(found), *_out(found))


def _failures(reading: Reading) -> list[str]:
    return [status for status in reading.by("status", REQUESTS) if status.startswith("5")]


def _phases(reading: Reading) -> list[str]:
    known = reading.by("phase", f"{PHASES}_count")
    return [phase for phase in ORDER if phase in known]


def _line(found: dict[str, Any]) -> Text:
    counted, unit = (found["trouble"], "") if found["requests_per_s"] is None else (found["trouble_per_s"], "/s")
    parts = [
        *_counts(found),
        f"\nfirst token p50 {_ms(found['ttft_p50_s'])} p99 {_ms(found['ttft_p99_s'])}",
        f"between tokens p50 {_ms(found['itl_p50_s'])} p99 {_ms(found['itl_p99_s'])}",
    ]
    trouble = [f"{words} {number:{'.1f' if unit else '.0f'}}{unit}" for words, number in counted.items() if number]
    return Text("  ".join(parts)).append(f"\n{', '.join(trouble)}" if trouble else "", style="bold red")


def _counts(found: dict[str, Any]) -> tuple[str, ...]:
    if found["requests_per_s"] is None:
        return f"{found['requests']:.0f} requests", f"{found['tokens']:.0f} streamed tokens since the router started"
    return f"{found['requests_per_s']:.1f} requests/s", f"{found['tokens_per_s']:.0f} streamed tokens/s"


def _phase_table(found: dict[str, Any]) -> Table:
    phases = found["phases_s"]
    table = Table(box=None, show_header=False)
    longest = max(filter(None, phases.values()), default=0.0)
    for phase, seconds in phases.items():
        bar = "━" * round(BAR * seconds / longest) if seconds else ""
        table.add_row(phase.replace("_", " "), Text(_ms(seconds), justify="right"), Text(bar, "cyan"))
    return table


def _member_table(found: dict[str, Any]) -> Table:
    """Fits 80 columns: a model's name is broken where it is long, what is a number or a URL never is."""
    table = Table(box=None, padding=(0, 1, 0, 0))
    for name in ("role", "url", "state", "requests", "tokens", "prefill\ntokens/s"):
        is_number = name in ("requests", "tokens", "prefill\ntokens/s")
        table.add_column(name, justify="right" if is_number else "left", no_wrap=True)
    table.add_column("model", overflow="fold")
    for member in found["members"]:
        state, style = _state(member)
        table.add_row(
            member["role"],
            member["url"],
            Text(state, style),
            str(member["in_flight_requests"]),
            str(member["in_flight_tokens"]),
            f"{member['prefill_tokens_per_s']:.0f}" if member["prefill_tokens_per_s"] else "",
            ", ".join(member["models"]),
        )
    return table


def _state(member: dict[str, Any]) -> tuple[str, str]:
    if not member["healthy"]:
        return "down", "bold red"
    if member["breaker"] != "closed":
        return f"failing ({member['breaker']})", "bold red"
    return ("ready", "green") if member["ready"] else ("not ready", "yellow")


def _out(found: dict[str, Any]) -> list[Text]:
    broken = [
        Text(f"transfers fail: {pair['prefill']} to {pair['decode']} ({pair['breaker']})", "bold red")
        for pair in found["broken_pairs"]
    ]
    strange = [
        Text(f"incompatible: {pair['prefill']} and {pair['decode']}", "yellow") for pair in found["incompatible_pairs"]
    ]
    # Of very many pairs the router lists the first ones.
    num_more = found.get("num_incompatible_pairs", 0) - len(strange)
    more = [Text(f"incompatible: {num_more:,} more pairs", "yellow")] if num_more > 0 else []
    return [*broken, *strange, *more]


def _ms(seconds: float | None) -> str:
    return f"{seconds * 1000:.1f} ms" if seconds else "-"
