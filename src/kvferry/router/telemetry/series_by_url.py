"""Which instances and pairs of the router have metrics of their own, so that their number is bounded."""

from __future__ import annotations

from collections import Counter

from prometheus_client.metrics import MetricWrapperBase

from kvferry.router.policy.records import Instance

OTHER = "other"
"""What stands in place of the names of instances that have no series of their own."""


class SeriesByUrl:
    """Which instances and pairs have series of their own: at most `max_instances`, and a quarter as many pairs. All
    that come later share one: pairs grow with the square of the instances, and a collector pays for every series.

    Only an instance that joins is named. What is heard of one that has left is not counted by its name again.
    """

    def __init__(self, max_instances: int) -> None:
        self._max_instances, self._max_pairs = max_instances, max_instances // 4
        self._instances: set[Instance] = set()
        self._urls: Counter[str] = Counter()
        self._pairs: set[tuple[str, str]] = set()
        # Series by each URL in their labels: to look for one URL among all would stop the router for a second.
        self._series: dict[str, set[tuple[MetricWrapperBase, tuple[str, ...]]]] = {}

    def join(self, instance: Instance) -> bool:
        """Give an instance series of its own, if there is room. Return whether it has them."""
        if instance not in self._instances and len(self._instances) < self._max_instances:
            self._instances.add(instance)
            self._urls[instance.url] += 1
        return instance in self._instances

    def name(self, url: str) -> str:
        """The name of an instance in labels."""
        return url if url in self._urls else OTHER

    def names(self, prefill_url: str, decode_url: str) -> tuple[str, str]:
        """The names of a pair in labels. Without a prefill URL, decode is alone."""
        pair = (prefill_url, decode_url)
        if pair not in self._pairs:
            is_known = (not prefill_url or prefill_url in self._urls) and decode_url in self._urls
            if not is_known or len(self._pairs) >= self._max_pairs:
                return OTHER, OTHER
            self._pairs.add(pair)
        return pair

    def note(self, family: MetricWrapperBase, labels: tuple[str, ...]) -> None:
        """Note that there is a series with these labels."""
        for url in labels:
            if url in self._urls:
                self._series.setdefault(url, set()).add((family, labels))

    def leave(self, instance: Instance) -> list[tuple[MetricWrapperBase, tuple[str, ...]]]:
        """The series that go with an instance: all that name it, unless it has another role as well."""
        if instance not in self._instances:
            return []
        self._instances.discard(instance)
        self._urls[instance.url] -= 1
        if self._urls[instance.url]:
            return []
        del self._urls[instance.url]
        self._pairs = {pair for pair in self._pairs if instance.url not in pair}
        gone = list(self._series.pop(instance.url, ()))
        for family, labels in gone:
            for url in labels:
                self._series.get(url, set()).discard((family, labels))
        return gone
