"""How this engine reaches its peers, and what that was chosen from, for `/kvferry/info`: plain JSON.

It names addresses and is for operators; answers to clients have nothing of it.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvferry import Direction, Measurement, PeerReport, Rates


def peers_json(everyone: Iterable[PeerReport]) -> list[dict[str, object]]:
    """One entry per connected peer."""
    return [
        {
            "peer": met.label,
            "place": str(met.place),
            "direction": str(met.direction),
            "transport": met.transport,
            "choice": met.choice,
            "measured": [_measured(each) for each in met.measurements],
            "warnings": [str(finding) for finding in met.findings],
        }
        for met in everyone
    ]


def _measured(each: Measurement) -> dict[str, object]:
    facts: dict[str, object] = {"transport": each.name, "carriers": list(each.carriers), "error": each.error}
    return facts | {str(direction): _rates(each.rates(direction)) for direction in Direction}


def _rates(rates: Rates) -> dict[str, object]:
    return {
        "bytes_per_second": rates.gigabytes_per_s * 1e9,
        "bytes_per_second_in_rows_of_4_kib": rates.row_gigabytes_per_s * 1e9,
        "latency_seconds": rates.latency_s,
        "error": rates.error,
    }
