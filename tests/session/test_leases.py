"""When leases end, and that nobody walks over all of them to find out."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.plan.description.describe import EngineShape, describe
from kvferry.plan.description.model import attention
from kvferry.session.commands import LeaseEnded
from kvferry.session.events import FrameArrived, LeaseRequest, LeaseWithdrawn, Tick
from kvferry.session.source.handshake import SourceIdentity
from kvferry.session.source.lease import Lease
from kvferry.session.source.session import SourceSession
from kvferry.session.timing import Timing
from kvferry.wire import messages as m

TIMING = Timing(lease_s=10.0, tombstone_s=7.0)
US, READER = m.Party("p0", "epoch-1", 0), m.Party("d0", "epoch-9", 0)
(LAYOUT,) = describe(attention(2, 2, 4, "float32", 4), EngineShape(1, 1, 4, 8, "token-major"), 1 << 20)


def session() -> SourceSession:
    return SourceSession(SourceIdentity(US, "0.1.0", (LAYOUT,), (), m.Probe(0, 0, 0)), TIMING)


def opened(number: int) -> LeaseRequest:
    return LeaseRequest(f"r{number}", f"l{number}", ((number % 8,),), 4)


def claimed(number: int) -> FrameArrived:
    reference = m.Reference("p0", "epoch-1", f"r{number}", f"l{number}")
    return FrameArrived("x", m.Claim(READER, f"c{number}", reference, 4, (0,)))


def landed(number: int) -> FrameArrived:
    return FrameArrived("x", m.Landed(READER, f"c{number}", f"l{number}"))


def renewed(number: int) -> FrameArrived:
    return FrameArrived("x", m.Renew(READER, (f"l{number}",)))


STEPS = st.tuples(
    st.sampled_from([opened, claimed, landed, renewed, lambda n: LeaseWithdrawn(f"r{n}"), lambda _: Tick()]),
    st.integers(0, 5),
    st.sampled_from([0.0, 0.5, 3.0, 8.0]),
)


@settings(max_examples=200)
@given(st.lists(STEPS, max_size=40))
def test_the_next_deadline_is_that_of_the_first_to_end_or_to_be_forgotten(steps):
    source, now, open_until = session(), 0.0, {}
    known = source._leases._by_id
    for make, number, after in steps:
        now += after
        if make is opened and (f"l{number}" in known or f"r{number}" in source._leases._by_request):
            continue
        for command in source.handle(make(number), now):
            if isinstance(command, LeaseEnded) and command.reason == m.Reason.EXPIRED:
                assert open_until[command.request_id] <= now
        assert source._leases.next_deadline() == min((lease.deadline for lease in known.values()), default=float("inf"))
        assert all(lease.deadline > now for lease in known.values())
        assert source._leases.may_be_read == any(lease.is_read for lease in known.values())
        open_until = {lease.request.request_id: lease.deadline for lease in known.values() if lease.live}


@pytest.mark.parametrize("looked_at", ["is_writing", "is_read", "live"])
def test_what_happens_to_one_lease_does_not_look_at_all(monkeypatch, looked_at):
    """At a hundred requests per second there are thousands of tombstones."""
    source = session()
    for number in range(300):
        source.handle(opened(number), 0.0)
        source.handle(claimed(number), 0.0)
        if number % 2:
            source.handle(landed(number), 0.0)
    source.may_be_read(0.0)
    for number in range(0, 300, 2):
        source.handle(landed(number), 0.1)
    looks, asked = [], getattr(Lease, looked_at)
    monkeypatch.setattr(Lease, looked_at, property(lambda lease: looks.append(lease) or asked.fget(lease)))
    source.may_be_read(0.2)
    looks.clear()
    for event in (opened(300), claimed(300), Tick(), landed(300), Tick()):
        source.handle(event, 0.3)
        source.may_be_read(0.3)
        source.next_deadline()
    assert len(looks) < 20


def test_a_lease_under_the_id_of_another_ends_at_once():
    """Its blocks would never be free again: by its id nobody finds it."""
    source = session()
    assert source.handle(LeaseRequest("first", "room-5", ((0,),), 4), 0.0) == []
    assert source.handle(LeaseRequest("second", "room-5", ((1,),), 4), 1.0) == [LeaseEnded("second", "lease_id_in_use")]
    ended = [one for now in range(2, 40) for one in source.handle(Tick(), float(now)) if isinstance(one, LeaseEnded)]
    assert [one.request_id for one in ended] == ["first"]
    assert source.num_live() == 0
    assert source.handle(LeaseRequest("third", "room-5", ((1,),), 4), 60.0) == []
