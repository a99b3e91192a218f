"""Does moving a cache pay? Compared with computing it again, which is what a decode engine would do alone."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.cli.units import format_seconds

EFFECTIVE_FLOP_PER_S = 400e12
"""What one rank computes while it prefills, unless the user says how many tokens it does: about 40 % of the dense
bfloat16 peak of a current data-centre GPU."""


@dataclass(frozen=True, slots=True)
class Prefill:
    """How fast the prompt would be computed: tokens per second, and where the number comes from. 0: unknown."""

    tokens_per_s: float
    source: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """`break_even_tokens_per_s`: an engine that prefills faster than this computes sooner than the cache arrives.

    `pays` is None when nobody knows how fast the prefill is; JSON says null.
    """

    pays: bool | None
    text: str
    break_even_tokens_per_s: float
    prefill_tokens_per_s: float


def prefill_of(stated_tokens_per_s: float, num_active_parameters: int, num_ranks: int) -> Prefill:
    """The user's own figure, or an estimate: two operations per weight and token, attention not counted."""
    if stated_tokens_per_s:
        return Prefill(stated_tokens_per_s, "as given")
    if not num_active_parameters:
        return Prefill(0.0, "unknown")
    rate = EFFECTIVE_FLOP_PER_S * num_ranks / (2 * num_active_parameters)
    ranks = "1 rank" if num_ranks == 1 else f"{num_ranks} ranks"
    what = f"estimated: {num_active_parameters / 1e9:,.1f} G active parameters, 400 TFLOP/s on each of {ranks}"
    return Prefill(rate, what)


def verdict_of(num_tokens: int, predicted_s: float, prefill: Prefill) -> Verdict:
    """Whether the cache arrives before ranks like the prefill's could have computed it in its place."""
    if not predicted_s:
        return Verdict(False, "Nothing moves, so there is nothing to gain.", 0.0, prefill.tokens_per_s)
    if not num_tokens:
        moving = format_seconds(predicted_s)
        text = f"No token is missing, so there is nothing to gain: states of fixed size move in {moving}."
        return Verdict(False, text, 0.0, prefill.tokens_per_s)
    break_even = num_tokens / predicted_s
    limit = (
        f"an engine that prefills more than {break_even:,.0f} tokens/s computes this prompt before its cache arrives"
    )
    if not prefill.tokens_per_s:
        return Verdict(None, f"Break-even: {limit}. Pass --prefill-speed for a verdict.", break_even, 0.0)
    compute_s = num_tokens / prefill.tokens_per_s
    speed = f"{prefill.tokens_per_s:,.0f} tokens/s ({prefill.source})"
    moving, computing = format_seconds(predicted_s), format_seconds(compute_s)
    if predicted_s >= compute_s:
        text = (
            f"Disaggregation will not pay here: moving takes {moving}, computing the prompt again only {computing} at "
            f"{speed}. Use a faster link, equal layouts, or skip prefill for such prompts."
        )
        return Verdict(False, text, break_even, prefill.tokens_per_s)
    text = (
        f"It can pay: moving takes {moving}, which adds {100 * predicted_s / compute_s:.1f} % to the {computing} of "
        f"computing the prompt at {speed}. Break-even: {limit}."
    )
    return Verdict(True, text, break_even, prefill.tokens_per_s)
