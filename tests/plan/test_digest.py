"""Digests over random pairs of engines: equal caches have equal digests whatever the layouts, and others do not."""

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.agent.digests import Digester, HostBytes
from kvferry.plan.digest import Policy, Subject, portions_of, subject_of
from kvferry.plan.extract import Extractor
from kvferry.plan.program import bind
from kvferry.plan.request import copies_for
from kvferry.plan.route import route
from kvferry.plan.tokens import TokenRange
from kvferry.testing import oracle
from kvferry.testing.strategies import handmade, scenarios
from kvferry.transport.base import Memory

many = settings(max_examples=200, deadline=None)
engines = st.one_of(scenarios(), handmade())
policies = st.sampled_from([Policy.SAMPLED, Policy.FULL])


class Rank:
    """A layout whose regions lie in real memory, one behind the other."""

    def __init__(self, layout, tables):
        starts = np.cumsum([0] + [region.size_bytes for region in layout.regions])
        self.bytes = np.full(max(1, int(starts[-1])), oracle.POISON, np.uint8)
        base = self.bytes.ctypes.data
        regions = [replace(r, address=base + int(s)) for r, s in zip(layout.regions, starts[:-1], strict=True)]
        self.layout, self.tables = replace(layout, regions=tuple(regions)), tables
        views = {r.address: self.bytes[s : s + r.size_bytes] for r, s in zip(regions, starts[:-1], strict=True)}
        self.memory = oracle.Memory(self.layout, views)
        self.digester = Digester(HostBytes([Memory(base, len(self.bytes), -1)], regions))

    def digest(self, subject: Subject, side: str, num_tokens: int):
        extracts = Extractor(self.layout, side).extracts(subject, self.tables, num_tokens)
        self.digester.start("key", extracts)
        (digested,) = self.digester.run(1 << 40)
        return digested.values


class Pair:
    """One source rank and one target rank of a scenario between which something moves, after it has moved."""

    def __init__(self, scenario, pair, policy, seed):
        legs = route(scenario.sources, scenario.targets).between(*pair)
        self.last = scenario.last
        self.source = Rank(scenario.sources[pair[0]], scenario.source_tables[pair[0]])
        self.target = Rank(scenario.targets[pair[1]], scenario.target_tables[pair[1]])
        oracle.fill(self.source.memory, self.source.tables, TokenRange(0, scenario.last))
        program = bind(legs, self.source.layout, self.target.layout)
        self.copies = copies_for(program, self.source.tables, self.target.tables, scenario.ranges)
        oracle.execute(self.copies, self.source.memory, self.target.memory, {})
        self.subject = subject_of(portions_of(legs, self.target.layout), scenario.ranges, policy, seed)

    def digests(self):
        return (
            self.source.digest(self.subject, "source", self.last),
            self.target.digest(self.subject, "target", self.last),
        )


def pairs_of(scenario):
    return route(scenario.sources, scenario.targets).pairs()


@many
@given(engines, policies, st.integers(0, 2**63 - 1))
def test_what_has_moved_has_one_digest_on_both_sides(scenario, policy, seed):
    for pair in pairs_of(scenario):
        ours, theirs = Pair(scenario, pair, policy, seed).digests()
        assert ours == theirs
        assert all(len(value) == 8 for value in ours)
