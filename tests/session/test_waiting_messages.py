"""What a source keeps of messages that came too early, and of claims that have been aborted."""

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
