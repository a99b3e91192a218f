"""A plan as one self-contained page: the facts of `kvferry plan --json` in, HTML text out."""

from __future__ import annotations

from base64 import b64encode
from collections import Counter
from collections.abc import Mapping
from functools import cache
from hashlib import sha256
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from kvferry.cli.plan.page.blocks import strips
from kvferry.cli.plan.page.drawing import draw
from kvferry.cli.plan.page.matrix import COLOURS, colour_of
from kvferry.cli.plan.plan_facts import moved_words
from kvferry.cli.units import TIMES, format_bytes, format_count, format_seconds, format_span


def page(facts: Mapping[str, Any]) -> str:
    """The page of one plan. It refers to nothing outside itself and shows without JavaScript."""
    environment = _environment()
    style, script = (_part(environment, name) for name in ("page.css", "page.js"))
    return environment.get_template("page.html.j2").render(
        plan=facts,
        style=style,
        script=script,
        script_digest=b64encode(sha256(script.encode()).digest()).decode(),
        drawing=draw(facts),
        strips=strips(facts),
        groups=_groups(facts),
        mix=Counter(pair["strategy"] for pair in facts["pairs"]).most_common(),
        reasons=_reasons(facts["pairs"]),
        totals=_totals(facts["pairs"]),
        colours=COLOURS,
    )


@cache
def _environment() -> Environment:
    # Model names and reasons come from users and their files: nothing reaches the page unescaped.
    environment = Environment(
        loader=PackageLoader("kvferry.cli.plan.page", ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["size"] = format_bytes
    environment.filters["time"] = format_seconds
    environment.filters["count"] = format_count
    environment.globals["format_span"] = format_span
    environment.globals["colour_of"] = colour_of
    return environment


def _part(environment: Environment, name: str) -> Markup:
    """A file of ours as it stands. The policy on the page allows this one script, by its digest."""
    loader = environment.loader
    return Markup(loader.get_source(environment, name)[0] if loader else "")


def _groups(facts: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The cache groups: their bytes, and which part of the request's tokens moves, in percent of the width."""
    groups = []
    for group in facts["groups"]:
        moved, per_token, fixed = group["moved_tokens"], group["bytes_per_token"], group["fixed_bytes"]
        each = format_bytes(per_token * group["tokens_per_entry"])
        parts = [f"{moved_words(group)} {TIMES} {each}"] if moved and per_token else []
        parts += [f"{format_bytes(fixed)} that do not depend on the length"] if fixed else []
        tail = 100 * min(1.0, moved / max(1, facts["tokens"])) if per_token else 0.0
        words = " + ".join(parts) or "nothing"
        groups.append({**group, "bytes": round(moved * per_token) + fixed, "tail": tail, "words": words})
    return groups


def _reasons(pairs: list[Mapping[str, Any]]) -> dict[str, str]:
    """A letter or number for each different reason, in the order of the pairs."""
    return {reason: str(number) for number, reason in enumerate(dict.fromkeys(p["reason"] for p in pairs), start=1)}


def _totals(pairs: list[Mapping[str, Any]]) -> dict[str, float]:
    """The price of each strategy summed over the pairs, of those strategies that every pair could use."""
    names = [name for name in (pairs[0]["prices"] if pairs else ()) if all(name in pair["prices"] for pair in pairs)]
    return {name: sum(pair["prices"][name] for pair in pairs) for name in names}
