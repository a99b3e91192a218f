"""What a source remembers of those that it has told how its memory is reached."""

from __future__ import annotations

from kvferry.plan.description.describe import EngineShape, describe
from kvferry.plan.description.model import attention
from kvferry.session.source.handshake import MAX_OFFERED, SourceHandshake, SourceIdentity
from kvferry.wire.messages import OfferRequest, Party, Probe

LAYOUTS = describe(attention(1, 2, 4, "float32", 4), EngineShape(1, 1, 4, 8, "token-major"), 1 << 20)
IDENTITY = SourceIdentity(Party("p0", "epoch-1", 0), "0.1.0", LAYOUTS, (), Probe(0, 0, 0))


def asked(introduction: SourceHandshake, name: str, now: float) -> None:
    introduction.offer(OfferRequest(Party(name, "epoch-9", 0)), now)


def test_whoever_was_told_may_be_testing_for_a_while():
    introduction = SourceHandshake(IDENTITY, handshake_s=5.0)
    assert not introduction.is_tested(0.0)
    asked(introduction, "d0", 0.0)
    assert introduction.is_tested(4.9)
    assert not introduction.is_tested(5.0)
    asked(introduction, "d0", 6.0)
    introduction.end_test(Party("d0", "epoch-9", 0))
    introduction.end_test(Party("d1", "epoch-9", 0))
    assert not introduction.is_tested(6.0)


def test_only_so_many_are_remembered():
    introduction = SourceHandshake(IDENTITY, handshake_s=5.0)
    for number in range(MAX_OFFERED):
        asked(introduction, f"d{number}", 0.0)
    asked(introduction, "one-more", 4.0)
    assert introduction.is_tested(4.9)
    assert not introduction.is_tested(5.5)
    asked(introduction, "later", 5.5)
    assert introduction.is_tested(6.0)
