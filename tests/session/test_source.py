from dataclasses import replace

import msgspec
import pytest
from playbook import play
from session_cases import OTHER_TARGET as OTHER_READER
from session_cases import REFERENCE, said
from session_cases import SOURCE as US
from session_cases import SOURCE_LAYOUT as LAYOUT
from session_cases import TARGET as READER

from kvferry.errors import IllegalEventError
from kvferry.plan.description.layout import Axis, CacheGroup, Layout, Placement, Region, State, fingerprint
from kvferry.plan.description.prompt import UNKNOWN_PROMPT, Prompt
from kvferry.plan.description.span import Span
from kvferry.session.commands import Count, LeaseEnded, Reply
from kvferry.session.events import LeaseRequest, LeaseWithdrawn, Tick
from kvferry.session.source.early_messages import MAX_EARLY, MAX_EARLY_OF_ONE
from kvferry.session.source.handshake import SourceIdentity
from kvferry.session.source.lease import LEASE_TABLE, LeaseState
from kvferry.session.source.session import SourceSession
from kvferry.session.state_machine import StateMachine
from kvferry.session.timing import Timing
from kvferry.wire import messages as m

TIMING = Timing(lease_s=10.0, handshake_s=5.0, tombstone_s=60.0)
STRANGER = m.Party("d1", "epoch-5", 0)
IDENTITY = SourceIdentity(US, "0.1.0", (LAYOUT,), (), m.Probe(0, 0, 0))
LEASE = LeaseRequest("r1", "l1", ((3, 5),), 7)
CLAIM = m.Claim(READER, "c1", REFERENCE, 6, (0,))
GRANT = Reply("x", m.Grant("c1", ((3, 5),)))


def session(layout=LAYOUT) -> SourceSession:
    return SourceSession(replace(IDENTITY, layouts=(layout,)), TIMING)


@pytest.fixture
def source():
    return session()


def refusal(commands, reason):
    assert [c.message.reason for c in commands if isinstance(c, Reply)] == [reason]
    return True


def test_a_cache_is_claimed_read_validated_and_freed():
    play(
        session(),
        [
            (0, LEASE, []),
            (1, said(CLAIM), [GRANT]),
            (2, said(m.Renew(READER, ("l1",))), [Reply("x", m.Renewed(()))]),
            (2, said(m.Renew(READER, ("l1",), b"long")), [Reply("x", m.Renewed((), b"long"))]),
            (3, said(m.Landed(READER, "c1", "l1")), [Reply("x", m.Valid("c1")), LeaseEnded("r1", "done")]),
        ],
    )


def test_hello_names_us_and_the_layout():
    hello = m.Hello(m.WIRE_VERSION, "0.1.0", READER, "p0", "epoch-1")
    welcome = m.Welcome(m.WIRE_VERSION, "0.1.0", US, 1, fingerprint(LAYOUT))
    offer = m.Offer(US, LAYOUT, (), m.Probe(0, 0, 0))
    play(
        session(),
        [
            (0, said(hello), [Reply("x", welcome)]),
            (0, said(m.OfferRequest(READER)), [Reply("x", offer)]),
        ],
    )


@pytest.mark.parametrize(
    ("hello", "reason"),
    [
        (m.Hello(m.WIRE_VERSION + 1, "9.0", READER, "p0", "epoch-1"), m.Reason.WIRE_VERSION),
        (m.Hello(m.WIRE_VERSION, "0.1.0", READER, "p7", "epoch-1"), m.Reason.WRONG_ENGINE),
        (m.Hello(m.WIRE_VERSION, "0.1.0", READER, "p0", "epoch-0"), m.Reason.WRONG_EPOCH),
    ],
)
def test_a_hello_that_does_not_fit_is_refused(hello, reason):
    assert refusal(session().handle(said(hello), 0), reason)


@pytest.mark.parametrize(
    ("claim", "reason"),
    [
        (m.Claim(READER, "c1", m.Reference("p0", "epoch-0", "r1", "l1"), 6, (0,)), m.Reason.WRONG_EPOCH),
        (m.Claim(READER, "c1", m.Reference("p0", "epoch-1", "r2", "l1"), 6, (0,)), m.Reason.UNKNOWN_LEASE),
        (m.Claim(READER, "c1", REFERENCE, 8, (0,)), m.Reason.OUT_OF_RANGE),
    ],
)
def test_a_claim_that_the_record_does_not_support_is_refused(source, claim, reason):
    source.handle(LEASE, 0)
    assert refusal(source.handle(said(claim), 1), reason)
    assert source.num_live() == 1


@pytest.mark.parametrize("is_early", [True, False])
def test_an_abort_of_a_claim_for_another_start_of_the_engine_ends_nothing(source, is_early):
    """In rooms the leases of both have the same id."""
    stale = said(m.Claim(READER, "c1", m.Reference("p0", "epoch-0", "r1", "l1"), 6, (0,)))
    abort, aborted = said(m.Abort(READER, "c1", "l1")), Reply("x", m.Aborted("c1", US.epoch))
    if not is_early:
        source.handle(LEASE, 0)
    assert refusal(source.handle(stale, 1), m.Reason.WRONG_EPOCH)
    for _ in range(2):
        assert source.handle(abort, 1) == [aborted]
    if is_early:
        source.handle(LEASE, 2)
    again = msgspec.structs.replace(CLAIM, claim_id="c2")
    play(source, [(2, said(again), [Reply("x", m.Grant("c2", GRANT.message.block_tables))])])
    assert source.num_live() == 1


def test_a_claim_for_another_prompt_is_refused_and_claims_nothing():
    source, own = session(), Prompt.of(range(7))
    source.handle(replace(LEASE, prompt=own), 0)
    for tokens, lease_id in (([0, 1, 9], "l1"), (range(8), "l1"), (range(6), "another lease")):
        claim = msgspec.structs.replace(CLAIM, prompt=Prompt.of(tokens).name(lease_id))
        assert refusal(source.handle(said(claim), 1), m.Reason.WRONG_PROMPT)
    right = msgspec.structs.replace(CLAIM, prompt=Prompt.of(range(6)).name("l1"))
    play(source, [(1, said(right), [GRANT])])


def test_a_claim_for_a_prompt_without_a_name_is_told_so_and_claims_nothing(source):
    source.handle(replace(LEASE, is_unnamed=True), 0)
    assert refusal(source.handle(said(CLAIM), 1), m.Reason.UNNAMED_PROMPT)
    assert source.num_live() == 1


def test_a_lease_that_has_ended_keeps_no_prompt(source):
    source.handle(replace(LEASE, prompt=Prompt.of(range(7))), 0)
    source.handle(LeaseWithdrawn("r1"), 1)
    assert source._leases.get("l1").request.prompt == UNKNOWN_PROMPT


def test_a_second_engine_cannot_claim_a_claimed_lease(source):
    play(source, [(0, LEASE, []), (1, said(CLAIM), [GRANT])])
    assert refusal(source.handle(said(m.Claim(STRANGER, "c1", REFERENCE, 6, (0,))), 1), m.Reason.ALREADY_CLAIMED)


def test_a_second_attempt_of_the_same_reader_is_not_the_first_one_repeated(source):
    """Else the first attempt's completion frees the blocks while the second still reads, and both are told valid."""
    play(source, [(0, LEASE, []), (1, said(CLAIM), [GRANT]), (1, said(CLAIM), [GRANT])])
    assert refusal(source.handle(said(m.Claim(READER, "c2", REFERENCE, 6, (0,))), 1), m.Reason.ALREADY_CLAIMED)
    play(source, [(2, said(m.Abort(READER, "c2", "l1")), [Reply("x", m.Aborted("c2", US.epoch))])])
    assert refusal(source.handle(said(m.Landed(READER, "c2", "l1")), 2), m.Reason.NOT_CLAIMED)
    play(source, [(3, said(m.Landed(READER, "c1", "l1")), [Reply("x", m.Valid("c1")), LeaseEnded("r1", "done")])])
    assert refusal(source.handle(said(m.Landed(READER, "c2", "l1")), 4), m.Reason.NOT_CLAIMED)


def test_an_expired_lease_frees_its_blocks_once_and_is_never_valid_again(source):
    expired = [Count("leases_expired", m.Reason.EXPIRED), LeaseEnded("r1", "expired")]
    play(source, [(0, LEASE, []), (1, said(CLAIM), [GRANT]), (11.5, Tick(), expired), (12, Tick(), [])])
    assert refusal(source.handle(said(m.Landed(READER, "c1", "l1")), 13), m.Reason.EXPIRED)
    assert refusal(source.handle(said(CLAIM), 13), m.Reason.EXPIRED)
    assert source.num_live() == 0


def test_expiry_is_noticed_before_the_message_that_comes_too_late(source):
    play(source, [(0, LEASE, []), (1, said(CLAIM), [GRANT])])
    commands = source.handle(said(m.Landed(READER, "c1", "l1")), 11.5)
    assert commands[:2] == [Count("leases_expired", m.Reason.EXPIRED), LeaseEnded("r1", "expired")]
    assert refusal(commands, m.Reason.EXPIRED)


def test_heartbeats_keep_a_lease_and_say_which_are_gone(source):
    play(
        source,
        [
            (0, LEASE, []),
            (1, said(CLAIM), [GRANT]),
            (9, said(m.Renew(READER, ("l1", "l0"))), [Reply("x", m.Renewed(("l0",)))]),
            (18, said(m.Renew(STRANGER, ("l1",))), [Reply("x", m.Renewed(("l1",)))]),
            (18.5, said(m.Landed(READER, "c1", "l1")), [Reply("x", m.Valid("c1")), LeaseEnded("r1", "done")]),
        ],
    )


@pytest.mark.parametrize(
    "end",
    [said(m.Abort(READER, "c1", "l1")), LeaseWithdrawn("r1"), Tick()],
)
def test_a_heartbeat_does_not_keep_what_has_ended(source, end):
    """Else a reader goes on with blocks that the engine has given away, and the record of their end stays for ever."""
    play(source, [(0, LEASE, []), (1, said(CLAIM), [GRANT])])
    source.handle(end, 11.5 if isinstance(end, Tick) else 2)
    forgotten = source.next_deadline()
    play(source, [(30, said(m.Renew(READER, ("l1",))), [Reply("x", m.Renewed(("l1",)))])])
    assert source.next_deadline() == forgotten


def test_who_has_all_bytes_is_not_told_that_the_lease_is_gone_and_does_not_keep_its_record(source):
    """It may not have heard yet that it has them."""
    play(source, [(0, LEASE, []), (1, said(CLAIM), [GRANT])])
    source.handle(said(m.Landed(READER, "c1", "l1")), 2)
    play(source, [(30, said(m.Renew(STRANGER, ("l1",))), [Reply("x", m.Renewed(("l1",)))])])
    forgotten = source.next_deadline()
    play(source, [(forgotten - 1, said(m.Renew(READER, ("l1",))), [Reply("x", m.Renewed(()))])])
    play(source, [(forgotten, Tick(), [])])
    assert not list(source._leases)


def test_completions_are_identified_and_idempotent(source):
    """The same reader saying it twice is one completion: the blocks wait for the other reader."""
    both = m.Claim(READER, "c1", REFERENCE, 6, (0, 1))
    valid = Reply("x", m.Valid("c1"))
    play(
        source,
        [
            (0, LEASE, []),
            (1, said(both), [GRANT]),
            (1, said(m.Landed(READER, "c1", "l1")), [valid]),
            (2, said(m.Landed(READER, "c1", "l1")), [valid]),
            (3, said(m.Claim(OTHER_READER, "c2", REFERENCE, 6, (0, 1))), [Reply]),
            (4, said(m.Landed(OTHER_READER, "c2", "l1")), [Reply, LeaseEnded("r1", "done")]),
            (5, said(m.Landed(READER, "c1", "l1")), [valid]),
        ],
    )


def test_landed_without_a_claim_is_refused(source):
    source.handle(LEASE, 0)
    assert refusal(source.handle(said(m.Landed(READER, "c1", "l1")), 1), m.Reason.NOT_CLAIMED)
    assert refusal(source.handle(said(m.Landed(READER, "c1", "l0")), 1), m.Reason.UNKNOWN_LEASE)


EARLY = m.Claim(READER, "c1", REFERENCE, 6, (0,))


def test_a_claim_that_is_faster_than_the_engine_waits_for_its_lease(source):
    assert source.handle(said(EARLY), 1) == []
    assert source.next_deadline() == 1 + TIMING.early_claim_s
    assert source.handle(said(EARLY), 2) == [Reply("x", m.Renewed(()))], "somebody is here"
    (granted,) = source.handle(LEASE, 3)
    assert granted == Reply("x", m.Grant("c1", LEASE.block_tables))
    assert source.next_deadline() == 3 + TIMING.lease_s


def test_a_claim_without_any_lease_is_refused_in_the_end(source):
    source.handle(said(EARLY), 1)
    assert refusal(source.handle(Tick(), 1 + TIMING.early_claim_s), m.Reason.UNKNOWN_LEASE)
    assert source.next_deadline() == float("inf")


def test_an_abort_that_is_faster_than_the_engine_ends_the_lease_as_it_opens(source):
    source.handle(said(EARLY), 1)
    source.handle(said(m.Abort(READER, "c1", "l1")), 2)
    commands = source.handle(LEASE, 3)
    assert [type(command) for command in commands] == [Reply, LeaseEnded]
    assert source.num_live() == 0


def test_a_state_of_fixed_size_is_only_good_after_the_tokens_that_made_it():
    """A recurrent state after 7 tokens is not the one after 6: it would go on with wrong tokens."""
    state = State("ssm", "float32", 4, (Axis("head", 2),), per_token=False)
    placement = Placement("ssm", 0, 0, 0, (Span(0, 2),), (4,), 8, 0)
    layout = Layout((state,), (Region(1 << 20, 64, "dram", 0),), (CacheGroup(1, 8, 0),), (placement,))
    for num_tokens, reason in ((6, m.Reason.OUT_OF_RANGE), (7, None), (0, None)):
        source = session(layout)
        source.handle(LEASE, 0)
        commands = source.handle(said(m.Claim(READER, "c1", REFERENCE, num_tokens, (0,))), 1)
        assert refusal(commands, reason) if reason else isinstance(commands[0].message, m.Grant)


@pytest.mark.parametrize(
    ("window", "chunk", "ring"),
    [(4, 0, 4), (4, 0, 3), (0, 4, 4), (4, 0, 5), (0, 3, 4), (0, 2, 3), (1, 0, 1), (9, 0, 9)],
)
def test_of_a_ring_only_what_has_not_been_written_over_can_be_claimed(window, chunk, ring):
    """The ring is played: what the next token sees has to be the last that was written to its place."""
    state = State("k", "float32", 4, (Axis("head", 2),), True, window_tokens=window, chunk_tokens=chunk)
    placement = Placement("k", 0, 0, 0, (Span(0, 2),), (4,), 8, 8)
    layout = Layout((state,), (Region(1 << 20, 72, "dram", 0),), (CacheGroup(1, 9, ring),), (placement,))
    written = {token % ring: token for token in range(7)}
    for num_tokens in range(8):
        first = num_tokens - (window - 1) if window else num_tokens // chunk * chunk
        is_kept = all(written[token % ring] == token for token in range(max(0, first), num_tokens))
        source = session(layout)
        source.handle(LEASE, 0)
        commands = source.handle(said(m.Claim(READER, "c1", REFERENCE, num_tokens, (0,))), 1)
        assert isinstance(commands[0].message, m.Grant) if is_kept else refusal(commands, m.Reason.OUT_OF_RANGE)


def test_only_so_many_claims_may_wait_and_the_others_are_asked_for_again(source):
    for number in range(MAX_EARLY):
        claim = m.Claim(READER, "c1", m.Reference("p0", "epoch-1", "r1", f"made-up-{number}"), 6, (0,))
        assert source.handle(said(claim, f"peer {number % 16}"), 1) == []
    assert source.handle(said(EARLY), 1) == [Reply("x", m.Renewed(()))]
    # It was not kept: the lease opens, and nothing of it is granted until it is asked for again.
    assert not any(isinstance(command, Reply) for command in source.handle(LEASE, 2))
    assert isinstance(source.handle(said(EARLY), 3)[0].message, m.Grant)


def test_one_peer_does_not_take_the_room_of_others_claims(source):
    for number in range(MAX_EARLY_OF_ONE + 1):
        reference = m.Reference("p0", "epoch-1", "r1", f"made-up-{number}")
        commands = source.handle(said(m.Claim(READER, "c1", reference, 6, (0,)), "greedy"), 1)
    assert commands == [Reply("greedy", m.Renewed(()))]
    assert source.handle(said(EARLY), 1) == []


def test_a_claim_for_which_there_was_no_room_is_aborted_like_others(source):
    """Its lease would keep its blocks for nobody."""
    for number in range(MAX_EARLY_OF_ONE):
        reference = m.Reference("p0", "epoch-1", "r1", f"made-up-{number}")
        source.handle(said(m.Claim(READER, "c1", reference, 6, (0,))), 1)
    assert source.handle(said(EARLY), 1) == [Reply("x", m.Renewed(()))]
    assert source.handle(said(m.Abort(READER, EARLY.claim_id, "l1")), 2) == [Reply("x", m.Aborted("c1", US.epoch))]
    assert LeaseEnded("r1", m.Reason.ABORTED) in source.handle(LEASE, 3)


def test_an_abort_frees_the_blocks_and_is_acknowledged_every_time():
    aborted = Reply("x", m.Aborted("c1", US.epoch))
    play(
        session(),
        [
            (0, LEASE, []),
            (1, said(CLAIM), [GRANT]),
            (2, said(m.Abort(STRANGER, "c1", "l1")), [aborted]),
            (2, said(m.Abort(READER, "c1", "l1")), [aborted, LeaseEnded("r1", m.Reason.ABORTED)]),
            (3, said(m.Abort(READER, "c1", "l1")), [aborted]),
        ],
    )


def test_a_withdrawn_lease_is_over(source):
    freed = LeaseEnded("r1", "withdrawn")
    play(source, [(0, LEASE, []), (1, LeaseWithdrawn("r1"), [freed]), (2, LeaseWithdrawn("r1"), [])])
    assert refusal(source.handle(said(CLAIM), 3), m.Reason.EXPIRED)


def test_tombstones_are_forgotten(source):
    play(source, [(0, LEASE, []), (1, LeaseWithdrawn("r1"), [LeaseEnded]), (100, Tick(), [])])
    assert source.next_deadline() == float("inf")


def test_a_message_that_only_sources_send_is_refused():
    assert refusal(session().handle(said(m.Valid("c1")), 0), m.Reason.MALFORMED)


def test_an_illegal_event_raises_with_the_history():
    machine = StateMachine("lease l1", LEASE_TABLE, LeaseState.OPEN)
    machine.move("claim")
    machine.move("abort")
    with pytest.raises(IllegalEventError, match="open -claim-> claimed -abort-> aborted"):
        machine.move("claim")


def test_every_state_of_the_table_can_be_reached():
    reached = {LeaseState.OPEN} | set(LEASE_TABLE.values())
    assert reached == set(LeaseState)


def test_timing_is_data():
    assert replace(TIMING, heartbeat_s=2.0, missed_heartbeats=4).silence_s == 8.0


def test_every_claim_adds_its_readers_and_keeps_the_lease(source):
    play(source, [(0, LEASE, []), (9, said(CLAIM), [GRANT]), (12, Tick(), [])])
    play(source, [(18, said(m.Claim(OTHER_READER, "c2", REFERENCE, 6, (1,))), [Reply]), (27, Tick(), [])])
    play(source, [(27, said(m.Landed(READER, "c1", "l1")), [Reply("x", m.Valid("c1"))]), (36, Tick(), [])])
    play(source, [(36, said(m.Landed(OTHER_READER, "c2", "l1")), [Reply, LeaseEnded("r1", "done")])])


def test_a_later_claim_does_not_take_readers_away(source):
    both, one = m.Claim(READER, "c1", REFERENCE, 6, (0, 1)), m.Claim(OTHER_READER, "c2", REFERENCE, 6, (1,))
    play(source, [(0, LEASE, []), (1, said(both), [Reply]), (1, said(one), [Reply])])
    play(source, [(2, said(m.Landed(OTHER_READER, "c2", "l1")), [Reply("x", m.Valid("c2"))])])


def test_another_incarnation_of_the_reader_is_another_engine(source):
    play(source, [(0, LEASE, []), (1, said(CLAIM), [GRANT])])
    restarted = m.Party("d0", "epoch-10", 1)
    assert refusal(source.handle(said(m.Claim(restarted, "c1", REFERENCE, 6, (1,))), 1), m.Reason.ALREADY_CLAIMED)


def test_before_any_claim_whoever_knows_the_lease_may_end_it():
    abort = said(m.Abort(READER, "c1", "l1"))
    play(
        session(),
        [(0, LEASE, []), (1, abort, [Reply("x", m.Aborted("c1", US.epoch)), LeaseEnded("r1", m.Reason.ABORTED)])],
    )


def test_before_any_claim_whoever_knows_the_lease_keeps_it_alive():
    renew = said(m.Renew(READER, ("l1", "l2")))
    alive = [Reply("x", m.Renewed(("l2",)))]
    source = session()
    play(source, [(0, LEASE, []), (8, renew, alive), (16, renew, alive), (24, said(CLAIM), [GRANT])])
    stranger = said(m.Renew(STRANGER, ("l1",)))
    assert source.handle(stranger, 33.0) == [Reply("x", m.Renewed(("l1",)))]
    assert LeaseEnded("r1", m.Reason.EXPIRED) in source.handle(Tick(), 34.1)


def test_memory_may_be_read_from_an_offer_to_the_end_of_the_claims(source):
    """Some transports need the source's help meanwhile, and only then."""
    assert not source.may_be_read(0.0)
    source.handle(said(m.OfferRequest(READER)), 1.0)
    assert source.may_be_read(5.9)
    assert not source.may_be_read(6.1)
    source.handle(LEASE, 7.0)
    assert not source.may_be_read(7.0)
    source.handle(said(CLAIM), 8.0)
    assert source.may_be_read(8.0)
    source.handle(said(m.Landed(READER, "c1", "l1")), 9.0)
    assert not source.may_be_read(9.0)


def test_a_claim_says_that_the_tests_are_over(source):
    source.handle(said(m.OfferRequest(READER)), 0.0)
    source.handle(LEASE, 0.0)
    source.handle(said(CLAIM), 0.5)
    source.handle(said(m.Landed(READER, "c1", "l1")), 1.0)
    assert not source.may_be_read(1.0)


def test_who_needs_nothing_says_that_the_tests_are_over(source):
    """While it tests it may renew what it is going to claim."""
    source.handle(LEASE, 0.0)
    source.handle(said(m.OfferRequest(READER)), 0.0)
    source.handle(said(m.Renew(READER, ("l1",))), 0.4)
    source.handle(said(m.Renew(STRANGER, ())), 0.4)
    assert source.may_be_read(0.5)
    play(source, [(0.5, said(m.Renew(READER, ())), [Reply("x", m.Renewed(()))])])
    assert not source.may_be_read(0.5)


def test_one_readers_claim_does_not_say_that_anothers_tests_are_over(source):
    source.handle(LEASE, 0.0)
    for party in (READER, STRANGER):
        source.handle(said(m.OfferRequest(party)), 1.0)
    source.handle(said(CLAIM), 2.0)
    source.handle(said(m.Landed(READER, "c1", "l1")), 2.5)
    assert source.may_be_read(2.5)
    assert not source.may_be_read(6.1)


@pytest.mark.parametrize("end", [said(m.Abort(READER, "c1", "l1")), LeaseWithdrawn("r1"), Tick()])
def test_a_read_goes_on_after_its_lease_until_the_record_is_forgotten(source, end):
    """Some tickets end only with the source's help, and the reader's blocks are in quarantine until then."""
    play(source, [(0, LEASE, []), (1, said(CLAIM), [GRANT])])
    source.handle(end, 11.5)
    assert source.num_live() == 0
    assert source.may_be_read(12.0)
    source.handle(Tick(), 72.0)
    assert not source.may_be_read(72.0)
