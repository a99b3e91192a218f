"""Leases that grow: what is claimed of them waits for its tokens, however long they take."""

from dataclasses import replace

import pytest
from playbook import play
from session_cases import ALIVE, REFERENCE, answer, failure, said
from session_cases import SOURCE as US
from session_cases import TARGET as THEM
from session_cases import TARGET_OFFER as OFFER
from test_source_push import ABORT, CLAIM, CLEAN, GRANT, KEY, LANDED, LEASE, MET, NUM_BYTES, TIMING
from test_source_push import source as source  # the fixture
from test_target_push import GRANTED, HANDSHAKE, RENEW, WRITTEN
from test_target_push import LANDED as TELL_LANDED
from test_target_push import TIMING as TARGET_TIMING
from test_target_push import target as target  # the fixture

from kvferry.plan.description.describe import EngineShape, describe
from kvferry.plan.description.layout import Axis, State
from kvferry.plan.description.model import CacheModel, Kept, LayerCache
from kvferry.plan.description.tokens import TokenRange
from kvferry.plan.programs.copies import Direction
from kvferry.session.commands import Cancel, Connect, Count, FetchFailed, LeaseEnded, Post, Reply
from kvferry.session.events import NOT_AHEAD, Ahead, LeaseProgress, Tick, TicketEnded
from kvferry.session.keys import SlotKey
from kvferry.session.source.handshake import SourceIdentity
from kvferry.session.source.session import SourceSession
from kvferry.wire import messages as m

NOWHERE = ((),)
GROWING = type(LEASE)(LEASE.request_id, LEASE.lease_id, NOWHERE, LEASE.num_tokens, is_growing=True)
BEGUN = [(0, GROWING, []), *MET[1:], (1, said(CLAIM), [GRANT])]
QUEUED = m.Queued("c1")
STRETCH = SlotKey(KEY, 0, 0)
VALID, FREE = Reply("x", m.Valid("c1")), LeaseEnded("r1", "done")


def grown(num_ready, tables=LEASE.block_tables, ahead=NOT_AHEAD):
    return LeaseProgress("r1", tables, num_ready, ahead)


def test_a_lease_is_done_once_all_is_computed_and_not_when_all_readers_are(source):
    """The target wants six tokens of seven."""
    play(source, [*BEGUN, (2, grown(5), []), (3, grown(6), [Post]), (4, TicketEnded(STRETCH, ""), [Reply, VALID])])
    play(source, [(5, said(LANDED), [VALID]), (6, grown(6), []), (7, grown(7), [FREE])])


def test_a_growing_lease_lasts_until_its_engine_stands_still(source):
    """A prompt may take longer than another lease lives, and has all of that time again when it goes on."""
    ended = 2 * TIMING.stalled_s - 1
    play(source, [(0, GROWING, []), (TIMING.stalled_s - 1, grown(5), []), (ended - 1, Tick(), [])])
    play(source, [(ended, Tick(), [Count, LeaseEnded("r1", "expired")])])


def test_a_lease_that_is_computed_lasts_as_long_as_any_other(source):
    play(source, [(0, GROWING, []), (1, grown(7), []), (TIMING.lease_s, Tick(), [])])
    play(source, [(1 + TIMING.lease_s, Tick(), [Count, LeaseEnded("r1", "expired")])])


def test_the_last_progress_repeated_changes_nothing(source):
    play(source, [*BEGUN, (2, grown(0, NOWHERE), []), (99, grown(6), [Post]), (100, grown(0, NOWHERE), [])])


def test_progress_that_goes_backwards_changes_nothing(source):
    """The lease is as computed as it was, and ends with its reader."""
    play(source, [*BEGUN, (2, grown(7), [Post]), (3, grown(0, NOWHERE), [])])
    play(source, [(4, TicketEnded(STRETCH, ""), [Reply, VALID, FREE]), (5, said(LANDED), [VALID])])


def test_who_waits_for_tokens_hears_that_they_are_still_computed(source):
    again = (2, said(CLAIM, "y"), [Reply("y", QUEUED)])
    play(source, [*BEGUN, again, (3, grown(6), [Post]), (4, said(CLAIM), [GRANT])])


@pytest.mark.parametrize("started", [HANDSHAKE, GRANTED], ids=["grant-lost", "granted"])
def test_a_target_waits_as_long_as_tokens_are_computed(target, started):
    """Longer than any transfer may take."""
    play(target, started)
    limit_s = int(TARGET_TIMING.transfer_s + TARGET_TIMING.handshake_s)
    for now in range(1, 3 * limit_s):
        target.handle(Tick(), now)
        play(target, [(now, answer(m.Queued("q1")), [])])
    play(target, [(3 * limit_s, WRITTEN, []), (3 * limit_s + 1, Tick(), [TELL_LANDED, RENEW])])


def test_a_target_does_not_wait_for_a_write_that_does_not_end(target):
    play(target, GRANTED)
    commands = []
    for now in range(1, int(TARGET_TIMING.transfer_s) + 2):
        commands = target.handle(Tick(), now)
        if any(isinstance(command, FetchFailed) for command in commands):
            break
        target.handle(answer(m.Grant("q1", ())), now)
        target.handle(answer(ALIVE), now)
    assert failure(commands).reason == "deadline"


@pytest.fixture
def cutting(source):
    """A source for which a few tokens are worth sending state by state; the model has four states."""
    source._writes.stretch_bytes = 1
    play(source, BEGUN)
    return source


def posted(commands):
    """(stretch, bytes) of what is posted."""
    return [(command.key.stretch, command.copies.num_bytes) for command in commands if isinstance(command, Post)]


def layers(num_tokens, num_states, num_ready=0):
    return grown(num_ready, ahead=Ahead(num_tokens, num_states))


STATE_BYTES = NUM_BYTES // 4


def test_states_are_sent_as_they_are_computed(cutting):
    numbers = [posted(cutting.handle(layers(6, number), number)) for number in range(1, 5)]
    assert numbers == [[(number, STATE_BYTES)] for number in range(4)]
    play(cutting, [(5, grown(6), []), *((6, TicketEnded(SlotKey(KEY, n, 0), ""), []) for n in range(3))])
    written, *_ = play(cutting, [(7, TicketEnded(SlotKey(KEY, 3, 0), ""), [Reply, VALID])])
    assert written.message.num_bytes == NUM_BYTES


def test_what_is_left_is_sent_when_all_is_computed(cutting):
    """The engine need not speak of its last states, nor twice of any."""
    assert len(posted(cutting.handle(layers(6, 2), 2))) == 2
    assert posted(cutting.handle(layers(6, 2), 3)) == []
    assert sum(num_bytes for _, num_bytes in posted(cutting.handle(grown(7), 4))) == NUM_BYTES // 2


def test_only_what_a_step_has_computed_is_sent_state_by_state(source):
    """What was sent after the step before is not sent again. Stretches are of four tokens, the prompt has 16."""
    source._writes.stretch_bytes = 1
    claim = m.Claim(THEM, "c1", REFERENCE, 16, (0,), Direction.WRITE, ((2, 1),), (TokenRange(0, 16),))
    play(source, [(0, replace(GROWING, num_tokens=16), []), *MET[1:], (1, said(claim), [GRANT])])
    four, tables = NUM_BYTES * 4 // 6, ((3, 5, 1, 2),)
    assert posted(source.handle(grown(8, tables), 2)) == [(0, four), (1, four)]
    words = [grown(8, tables, Ahead(16, number)) for number in (1, 2, 3)]
    assert [posted(source.handle(status, 3)) for status in words] == [[(number, four // 2)] for number in (2, 3, 4)]
    assert posted(source.handle(grown(16, tables), 4)) == [(5, four // 2)]


def test_states_of_fewer_tokens_are_not_sent_for_those_of_more(cutting):
    """All states of five tokens are there, and what is cut are the states of six."""
    assert len(posted(cutting.handle(layers(6, 1), 2))) == 1
    play(cutting, [(3, grown(4, ahead=Ahead(5, 4)), [])])
    assert len(posted(cutting.handle(grown(6), 4))) == 3


def test_what_is_sent_of_some_states_is_not_all(cutting):
    """The others are still computed when all tickets have ended: nothing is written yet, and who asks is patient."""
    cutting.handle(layers(6, 1), 2)
    play(cutting, [(3, TicketEnded(STRETCH, ""), []), (4, said(CLAIM, "y"), [Reply("y", QUEUED)])])
    assert len(posted(cutting.handle(grown(6), 5))) == 3


def kept(name, per_token):
    return (Kept(State(name, "float32", 4, (Axis("head", 2), Axis("dim", 4)), per_token), "head"),)


def test_the_last_states_are_sent_with_those_of_fixed_size():
    """The second layer keeps one state of a whole request: it is there once all tokens are, and then it is sent."""
    layers_of = (
        LayerCache(0, "full", kept("model.layers.0.k", True)),
        LayerCache(1, "ssm", kept("model.layers.1.s", False)),
    )
    model, token_bytes = CacheModel(2, layers_of), 4 * 2 * 4
    (layout,), (there,) = (describe(model, EngineShape(1, 1, 4, 8, "token-major"), base) for base in (1 << 20, 1 << 30))
    source = SourceSession(SourceIdentity(US, "0.1.0", (layout,), (), m.Probe(0, 0, 0)), TIMING)
    source._writes.stretch_bytes = 1
    lease = replace(GROWING, block_tables=((), ()))
    ranges, tables = (TokenRange(0, 7),) * 2, ((1, 2), (3,))
    claim = m.Claim(THEM, "c1", REFERENCE, 7, (0,), Direction.WRITE, tables, ranges)
    offer = m.TargetOffer(THEM, (there,), OFFER.transports, OFFER.probe)
    met = [(0, said(offer), [Connect(THEM, offer)]), MET[2], (0, lease, []), (1, said(claim), [GRANT])]
    play(source, met)
    words = [grown(0, tables, Ahead(7, number)) for number in (1, 2)]
    assert [posted(source.handle(status, 2)) for status in words] == [[(0, 7 * token_bytes)], [(1, token_bytes)]]


def test_little_is_not_sent_state_by_state(cutting):
    """One stretch of the six tokens lies within the first four, and one is not enough."""
    assert posted(cutting.handle(layers(4, 4), 2)) == []
    assert posted(cutting.handle(grown(4), 3)) == [(0, NUM_BYTES * 4 // 6)]
    assert posted(cutting.handle(layers(6, 4, num_ready=4), 4)) == []
    assert posted(cutting.handle(grown(6), 5)) == [(1, NUM_BYTES * 2 // 6)]


@pytest.mark.parametrize("wrong", [layers(8, 1), layers(6, 0), layers(0, 4)], ids=["too many", "no state", "no token"])
def test_what_an_engine_cannot_mean_is_not_sent(cutting, wrong):
    assert posted(cutting.handle(wrong, 2)) == []


def test_a_claim_that_comes_later_gets_what_is_there_by_then(source):
    source._writes.stretch_bytes = 1
    play(source, [*BEGUN[:-1], (1, layers(6, 3), [])])
    assert posted(source.handle(said(CLAIM), 2)) == [(number, STATE_BYTES) for number in range(3)]


def test_an_abort_between_two_states_begins_nothing_more(cutting):
    cutting.handle(layers(6, 1), 2)
    play(cutting, [(3, said(ABORT), [Cancel(STRETCH)]), (4, grown(7), [])])
    assert CLEAN.message == cutting.handle(TicketEnded(STRETCH, ""), 5)[0].message
