"""What the transfer agent has counted and measured: families for `/metrics`, and plain JSON for `/kvferry/info`.

The latter names addresses and is for operators; answers to clients have nothing of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvferry import Direction, Measurement, PeerReport, Rates
from kvferry.embedded.transfer.agent_transfer import AgentTransfer

PEER = ("peer", "transport", "carrier")


class AgentCollector(Collector):
    """The agent's counters, and how each connected peer is reached."""

    def __init__(self, transfer: AgentTransfer) -> None:
        self._transfer = transfer

    def collect(self) -> Iterator[Metric]:
        """Every failure moves exactly one labelled counter of the first family."""
        agent = self._transfer.agent
        events = CounterMetricFamily(
            "kvferry_agent_events", "What the transfer agent refused, dropped or failed.", labels=("what", "reason")
        )
        for (what, reason), count in sorted(agent.counts.items()):
            events.add_metric((what, str(reason)), count)
        yield events
        leases = CounterMetricFamily("kvferry_agent_leases_ended", "Offered caches, by outcome.", labels=("how",))
        for how, count in sorted(self._transfer.leases_ended.items()):
            leases.add_metric((how,), count)
        yield leases
        yield GaugeMetricFamily("kvferry_agent_open_reads", "Reads in progress.", value=agent.num_open_reads)
        yield GaugeMetricFamily(
            "kvferry_agent_open_slots", "Slots of staging memory held or waited for.", value=agent.num_slots
        )
        moved = CounterMetricFamily(
            "kvferry_agent_moved_bytes", "Bytes moved by reads and writes of this engine.", labels=("direction",)
        )
        for direction in Direction:
            moved.add_metric((direction,), agent.moved_bytes[direction])
        yield moved
        yield from _of_peers(agent.peers)


def _of_peers(everyone: tuple[PeerReport, ...]) -> Iterator[Metric]:
    """The self-test's figures of the transport that was chosen for each peer."""
    rates = GaugeMetricFamily(
        "kvferry_agent_peer_bytes_per_second",
        "Bandwidth to a peer, measured when it was first met.",
        labels=(*PEER, "direction", "rows"),
    )
    latency = GaugeMetricFamily(
        "kvferry_agent_peer_latency_seconds",
        "Time of a copy of 4 KiB to or from a peer, measured when it was first met.",
        labels=(*PEER, "direction"),
    )
    warnings = GaugeMetricFamily(
        "kvferry_agent_peer_warnings", "Number of problems found with the transport to a peer.", labels=PEER
    )
    for met in everyone:
        for measured in met.measurements:
            if measured.name != met.transport:
                continue
            labels = (met.label, met.transport, "+".join(measured.carriers))
            warnings.add_metric(labels, len(met.findings))
            for direction in Direction:
                found = measured.rates(direction)
                if not found.error:
                    rates.add_metric((*labels, direction, "long"), found.gigabytes_per_s * 1e9)
                    rates.add_metric((*labels, direction, "4KiB"), found.row_gigabytes_per_s * 1e9)
                    latency.add_metric((*labels, direction), found.latency_s)
    yield from (rates, latency, warnings)


def peers_json(everyone: Iterable[PeerReport]) -> list[dict[str, object]]:
    """How each connected peer is reached, and what that was chosen from."""
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
