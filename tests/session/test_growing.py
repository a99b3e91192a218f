"""Leases that grow: what is claimed of them waits for its tokens, however long they take."""

import pytest
from test_source_push import CLAIM, GRANT, KEY, LANDED, LEASE, MET, TIMING, said
from test_source_push import source as source  # the fixture
from test_target_push import GRANTED, HANDSHAKE, WRITTEN, answer, failure
from test_target_push import LANDED as TELL_LANDED
from test_target_push import TIMING as TARGET_TIMING
from test_target_push import target as target  # the fixture

from kvferry.session.events import Failed, LeaseGrown, Post, Reply, SlotKey, SourceFree, Tick, TicketEnded
from kvferry.testing.playbook import play
from kvferry.wire import messages as m

NOWHERE = ((),)
GROWING = type(LEASE)(LEASE.request_id, LEASE.lease_id, NOWHERE, LEASE.num_tokens, is_growing=True)
BEGUN = [(0, GROWING, []), *MET[1:], (1, said(CLAIM), [GRANT])]
QUEUED = m.Queued("c1")
STRETCH = SlotKey(KEY, 0, 0)
VALID, FREE = Reply("x", m.Valid("c1")), SourceFree("r1", "done")


def grown(num_ready, tables=LEASE.block_tables):
    return LeaseGrown("r1", tables, num_ready)


def test_a_lease_is_done_once_all_is_computed_and_not_when_all_readers_are(source):
    """The target wants six tokens of seven."""
    play(source, [*BEGUN, (2, grown(5), []), (3, grown(6), [Post]), (4, TicketEnded(STRETCH, ""), [Reply])])
    play(source, [(5, said(LANDED), [VALID]), (6, grown(6), []), (7, grown(7), [FREE])])


def test_the_last_word_said_again_changes_nothing_but_the_deadline(source):
    """A prompt may take longer than its lease lives."""
    waits = [(at, grown(0, NOWHERE), []) for at in range(2, 100, int(TIMING.lease_s) - 1)]
    play(source, [*BEGUN, *waits, (99, grown(6), [Post]), (100, grown(0, NOWHERE), [])])


def test_who_waits_for_tokens_hears_that_they_are_still_computed(source):
    again = (2, said(CLAIM, "y"), [Reply("y", QUEUED)])
    play(source, [*BEGUN, again, (3, grown(6), [Post]), (4, said(CLAIM), [GRANT])])


@pytest.mark.parametrize("begun", [HANDSHAKE, GRANTED], ids=["grant-lost", "granted"])
def test_a_target_waits_as_long_as_tokens_are_computed(target, begun):
    """Longer than any transfer may take."""
    play(target, begun)
    limit_s = int(TARGET_TIMING.transfer_s + TARGET_TIMING.handshake_s)
    for now in range(1, 3 * limit_s):
        target.handle(Tick(), now)
        play(target, [(now, answer(m.Queued("q1")), [])])
    play(target, [(3 * limit_s, WRITTEN, [TELL_LANDED])])


def test_a_target_does_not_wait_for_a_write_that_does_not_end(target):
    play(target, GRANTED)
    commands = []
    for now in range(1, int(TARGET_TIMING.transfer_s) + 2):
        commands = target.handle(Tick(), now)
        if any(isinstance(command, Failed) for command in commands):
            break
        target.handle(answer(m.Grant("q1", ())), now)
    assert failure(commands).reason == "deadline"
