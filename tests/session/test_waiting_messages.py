"""What a source keeps of messages that came too early, and of claims that have been aborted."""

import pytest

from kvferry.session.source.early_messages import (
    MAX_ABORTED,
    MAX_EARLY_OF_ONE,
    AbortedClaims,
    EarlyMessage,
    EarlyMessages,
)
from kvferry.wire import messages as m

ONE, OTHER = (m.Party(name, "epoch-9", 0) for name in ("d0", "d1"))


def early(party=ONE, lease_id="l1", peer="x", deadline=10.0, number=0):
    reference = m.Reference("p0", "epoch-1", "r1", lease_id)
    return EarlyMessage(peer, m.Claim(party, f"q{number}", reference, 6, (0,)), deadline)


def abort(lease_id="l1", peer="x", deadline=10.0):
    return EarlyMessage(peer, m.Abort(ONE, "q0", lease_id), deadline)


def test_a_lease_gets_the_messages_that_waited_for_it_and_no_others():
    waiting, mine, others = EarlyMessages(), early(), early(OTHER)
    for lease_id, message in (("l1", mine), ("l2", early(lease_id="l2")), ("l1", others)):
        assert waiting.add(lease_id, message)
    assert waiting.opened("l1") == [mine, others]
    assert waiting.opened("l1") == []
    assert (waiting.knows("l2", ONE), waiting.knows("l1", ONE)) == (True, False)


def test_a_message_takes_the_place_of_an_earlier_one_and_not_its_time():
    waiting, again = EarlyMessages(), early(peer="y", deadline=99.0, number=1)
    waiting.add("l1", early())
    waiting.add("l1", again)
    assert waiting.next_deadline() == 10.0
    assert waiting.expired(9.9) == []
    assert waiting.expired(10.0) == [EarlyMessage("y", again.message, 10.0)]


def test_one_peer_cannot_take_all_the_room_and_may_still_repeat_itself():
    waiting = EarlyMessages()
    for number in range(MAX_EARLY_OF_ONE):
        assert waiting.add(f"l{number}", early(lease_id=f"l{number}"))
    assert not waiting.add("one more", early(lease_id="one more"))
    assert waiting.add("l0", early(lease_id="l0", number=1))
    assert waiting.add("one more", early(OTHER, "one more", peer="y"))


@pytest.mark.parametrize(
    "take_out",
    [
        lambda waiting: waiting.opened("l5"),
        lambda waiting: waiting.expired(10.0),
        lambda waiting: waiting.add("l7", abort("l7")),
        # The same party asks again by way of another peer.
        lambda waiting: waiting.add("l8", early(lease_id="l8", peer="y")),
    ],
)
def test_a_claim_that_is_gone_makes_room_for_one_other(take_out):
    waiting = EarlyMessages()
    for number in range(MAX_EARLY_OF_ONE):
        waiting.add(f"l{number}", early(lease_id=f"l{number}", deadline=10.0 + number))
    assert not waiting.add("one more", early(lease_id="one more", deadline=999.0))
    assert take_out(waiting)
    assert waiting.add("one more", early(lease_id="one more", deadline=999.0))
    assert not waiting.add("too many", early(lease_id="too many", deadline=999.0))


def test_a_claim_needs_room_also_where_an_abort_waits():
    waiting = EarlyMessages()
    for number in range(MAX_EARLY_OF_ONE + 1):
        assert waiting.add(f"l{number}", abort(f"l{number}"))
    kept = [waiting.add(f"l{number}", early(lease_id=f"l{number}")) for number in range(MAX_EARLY_OF_ONE + 1)]
    assert kept == [True] * MAX_EARLY_OF_ONE + [False]
    assert waiting.opened(f"l{MAX_EARLY_OF_ONE}") == [abort(f"l{MAX_EARLY_OF_ONE}")]


class LookedAt(EarlyMessage):
    """Counts how often anything of any message is asked for."""

    num_looks = 0

    def __getattribute__(self, name):
        LookedAt.num_looks += 1
        return super().__getattribute__(name)


def test_only_the_messages_that_are_meant_are_looked_at():
    """They are kept by whoever can connect, and the thread that looks at them moves the bytes of all."""
    waiting = EarlyMessages()
    for number in range(MAX_ABORTED):
        known = abort(f"l{number}", deadline=float(number))
        waiting.add(f"l{number}", LookedAt(known.peer, known.message, known.deadline))
    LookedAt.num_looks = 0
    assert waiting.next_deadline() == 0.0
    assert [len(waiting.expired(1.0)), len(waiting.opened("l9"))] == [2, 1]
    assert waiting.add("l3", early(lease_id="l3"))
    assert waiting.add("another", early(lease_id="another", deadline=99999.0))
    assert LookedAt.num_looks < 50


def test_aborted_claims_are_remembered_for_their_time_from_the_last_abort_on():
    aborted = AbortedClaims()
    aborted.add(ONE, "q1", 10.0)
    aborted.add(ONE, "q2", 11.0)
    aborted.add(ONE, "q1", 12.0)
    assert aborted.next_deadline() == 11.0
    aborted.expire(11.0)
    assert ((ONE, "q1") in aborted, (ONE, "q2") in aborted, (OTHER, "q1") in aborted) == (True, False, False)
    aborted.expire(12.0)
    assert len(aborted) == 0


def test_no_more_aborted_claims_are_promised_to_be_remembered_than_there_is_room_for():
    aborted = AbortedClaims()
    assert all(aborted.add(ONE, f"q{number}", 10.0) for number in range(MAX_ABORTED))
    assert not aborted.add(ONE, "one more", 10.0)
    assert aborted.add(ONE, "q0", 10.0), "one that is known takes no more room"
