"""Two real agents over real sockets and real transports, caches without an engine."""

import errno
import socket
import threading
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial

import agent_support
import msgspec
import pytest
import zmq
from agent_support import NIXL, SOURCE, TARGET
from engines import oracle

from kvferry import Agent, AgentConfig, Cache, new_lease_id
from kvferry.agent.control import channel
from kvferry.agent.control.shared_token import SharedToken
from kvferry.errors import ConfigurationError, RequestError
from kvferry.plan.description.tokens import TokenRange
from kvferry.session.commands import BlocksReleased, Fetched, FetchFailed, LeaseEnded
from kvferry.session.events import FetchRequest, HoldRequest, LeaseRequest
from kvferry.session.timing import Timing
from kvferry.transport.base import Completion, Ticket
from kvferry.transport.registry import open_transports
from kvferry.wire.codec import decode, frame_of
from kvferry.wire.messages import WIRE_VERSION, Reason, Reference, Refusal

# An offer whose span ends at 2**64 - 1: more than `len` can say.
HUGE_SPAN = msgspec.msgpack.encode(
    {
        "type": "offer",
        "party": {"engine_id": "x", "epoch": "x", "rank": 0},
        "layout": {
            "states": [
                {
                    "name": "s",
                    "dtype": "x",
                    "item_bytes": 1,
                    "axes": [{"name": "a", "extent": 2**64 - 1}],
                    "per_token": True,
                }
            ],
            "regions": [{"address": 0, "size_bytes": 2**62, "kind": "dram", "device": 0}],
            "groups": [{"block_tokens": 1, "num_blocks": 1, "ring_tokens": 0}],
            "placements": [
                {
                    "state": "s",
                    "region": 0,
                    "group": 0,
                    "offset": 0,
                    "spans": [{"start": 0, "stop": 2**64 - 1}],
                    "strides": [1],
                    "block_stride": 1,
                    "token_stride": 1,
                }
            ],
        },
        "transports": [],
        "probe": {"address": 0, "size_bytes": 0, "seed": 0},
    }
)
SOURCE_TABLES = [[3, 4, 5, 1, 12]]
TARGET_TABLES = ((7, 2, 0),)
NUM_TOKENS = 18
# A part of what was computed.
check = partial(agent_support.check, num_tokens=NUM_TOKENS, tables=TARGET_TABLES)
DEADLINE_MS = 30_000


def leased(source) -> Reference:
    oracle.fill(source.memory, SOURCE_TABLES, TokenRange(0, NUM_TOKENS + 1))
    return source.agent.lease(LeaseRequest("r1", new_lease_id(), SOURCE_TABLES, NUM_TOKENS + 1))


@pytest.mark.parametrize("transport", ["shm", "tcp", NIXL, "auto"])
def test_a_cache_moves_between_two_layouts(make_rank, transport):
    source, target = make_rank("p0", SOURCE, transport), make_rank("d0", TARGET, transport)
    target.agent.fetch(target.wanted(source, leased(source), TARGET_TABLES, NUM_TOKENS))
    report = target.next_notice(Fetched).report
    check(target)
    assert source.next_notice(LeaseEnded) == LeaseEnded("r1", "done")
    assert report.tokens == NUM_TOKENS
    assert transport in (report.transport, "auto")
    assert set(report.phases_s) == {"handshake", "claim", "wire", "verify"}


def test_auto_measures_what_could_be_best_and_says_what_it_found(make_rank):
    source, target = make_rank("p0", SOURCE, "auto"), make_rank("d0", TARGET, "auto")
    target.agent.fetch(target.wanted(source, leased(source), TARGET_TABLES, NUM_TOKENS))
    report = target.next_notice(Fetched).report
    measured = {part.split()[0] for part in report.choice.split("; ") if "GB/s" in part}
    assert {"shm", "cma"} <= measured
    assert report.transport in measured
    assert "tcp not tested" in report.choice


def test_an_empty_range_is_valid_and_moves_nothing(make_rank):
    source, target = make_rank("p0", SOURCE), make_rank("d0", TARGET)
    target.agent.fetch(target.wanted(source, leased(source), TARGET_TABLES, 0))
    assert target.next_notice(Fetched).report.num_bytes == 0
    check(target, num_tokens=0)


@pytest.mark.slow
def test_a_made_up_reference_is_a_typed_failure_and_frees_the_blocks(make_rank):
    source, target = make_rank("p0", SOURCE), make_rank("d0", TARGET)
    real = leased(source)
    made_up = Reference(real.engine_id, real.epoch, real.request_id, "guess")
    target.agent.fetch(target.wanted(source, made_up, TARGET_TABLES, NUM_TOKENS))
    assert target.next_notice(FetchFailed).error.reason == "unknown_lease"
    assert target.next_notice(BlocksReleased) == BlocksReleased("q1")
    check(target, num_tokens=0)


def test_a_restarted_source_is_refused_and_the_new_one_works(make_rank):
    source, target = make_rank("p0", SOURCE), make_rank("d0", TARGET)
    old = leased(source)
    restarted = make_rank("p0", SOURCE)
    target.agent.fetch(target.wanted(restarted, old, TARGET_TABLES, NUM_TOKENS))
    assert target.next_notice(FetchFailed).error.reason == "wrong_epoch"
    target.next_notice(BlocksReleased)
    target.agent.fetch(target.wanted(restarted, leased(restarted), TARGET_TABLES, NUM_TOKENS, "q2"))
    target.next_notice(Fetched)
    check(target)


def test_a_source_that_is_gone_is_noticed(make_rank):
    source, target = make_rank("p0", SOURCE), make_rank("d0", TARGET)
    reference = leased(source)
    source.agent.close()
    target.agent.fetch(target.wanted(source, reference, TARGET_TABLES, NUM_TOKENS))
    assert target.next_notice(FetchFailed).error.reason == "peer_lost"
    target.next_notice(BlocksReleased)


def test_a_host_that_answers_nothing_is_given_up_long_before_a_handshake_ends(make_rank):
    """Here a listener whose queue is full: its host ignores who else comes."""
    source = make_rank("p0", SOURCE)
    target = make_rank("d0", TARGET, timing=Timing(resend_s=0.1, handshake_s=1000.0))
    reference = leased(source)
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener, ExitStack() as queued:
        for _ in range(4):
            waiting = queued.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK))
            waiting.connect_ex(listener.getsockname())
        wanted = target.wanted(source, reference, TARGET_TABLES, NUM_TOKENS)
        target.agent.fetch(replace(wanted, addresses=(f"tcp://127.0.0.1:{listener.getsockname()[1]}",)))
        error = target.next_notice(FetchFailed).error
    assert error.reason == "unreachable"
    assert "nothing answers at" in str(error)
    target.next_notice(BlocksReleased)


def test_too_few_target_blocks_fail_only_that_request(make_rank):
    source, target = make_rank("p0", SOURCE), make_rank("d0", TARGET)
    target.agent.fetch(target.wanted(source, leased(source), ((7,),), NUM_TOKENS))
    error = target.next_notice(FetchFailed).error
    assert error.reason == "out_of_range"
    assert "target group 0 has too few blocks" in str(error)
    target.next_notice(BlocksReleased)
    assert source.next_notice(LeaseEnded).reason == "aborted"
    target.agent.fetch(target.wanted(source, leased(source), TARGET_TABLES, NUM_TOKENS, "q2"))
    target.next_notice(Fetched)


def test_a_lease_that_nobody_claims_expires(make_rank):
    source = make_rank("p0", SOURCE, timing=Timing(lease_s=0.2))
    leased(source)
    assert source.next_notice(LeaseEnded).reason == "expired"
    assert source.agent.counts["leases_expired", "expired"] == 1


def test_another_transport_than_the_peers_is_a_typed_failure(make_rank):
    source, target = make_rank("p0", SOURCE, "shm"), make_rank("d0", TARGET, "tcp")
    target.agent.fetch(target.wanted(source, leased(source), TARGET_TABLES, NUM_TOKENS))
    error = target.next_notice(FetchFailed).error
    assert error.reason == "unreachable"
    assert "--transport shm" in str(error)


def test_nonsense_on_the_control_channel_is_refused_and_changes_nothing(make_rank):
    source, target = make_rank("p0", SOURCE), make_rank("d0", TARGET)
    another_version = b"KF" + bytes([WIRE_VERSION + 1]) + b"\x80"
    context = zmq.Context()
    stranger = context.socket(zmq.DEALER)
    stranger.connect(source.agent.address)
    try:
        for frame in (
            b"",
            b"hello",
            another_version,
            b"KF" + bytes([WIRE_VERSION]) + b"\xff",
            frame_of(b"\x81\xa4type\xa5offer"),
            frame_of(HUGE_SPAN),
        ):
            stranger.send(frame)
            assert stranger.poll(DEADLINE_MS), "no answer"
            answer = decode(stranger.recv())
            assert isinstance(answer, Refusal)
            assert answer.reason is (Reason.WIRE_VERSION if frame == another_version else Reason.MALFORMED)
    finally:
        context.destroy(linger=0)
    assert source.agent.counts["frames_refused", "malformed"] == 5
    assert source.agent.counts["frames_refused", "wire_version"] == 1
    target.agent.fetch(target.wanted(source, leased(source), TARGET_TABLES, NUM_TOKENS))
    target.next_notice(Fetched)


@pytest.fixture
def cache(make_rank):
    """An engine without a cache of its own: enough for an agent that must not start."""
    return Cache((make_rank("p0", SOURCE).memory.layout,), ())


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"direction": "pull"}, "the direction is none; found: 'pull'; expected: Direction.READ or Direction.WRITE"),
        # Equal to a member, and still none.
        ({"direction": "write"}, "found: 'write'"),
        ({"digest": "full"}, "the digest policy is none; found: 'full'; expected: DigestPolicy.OFF or"),
        ({"digest": None}, "found: None"),
    ],
)
def test_what_is_no_direction_or_digest_policy_is_refused(given, words):
    with pytest.raises(ConfigurationError, match=words):
        AgentConfig("p1", **given)


@pytest.mark.parametrize("port", [-1, 65_536, 1 << 70])
def test_a_port_that_does_not_exist_is_refused(port):
    with pytest.raises(
        ConfigurationError, match=f"engine p1-1 cannot listen .*; found: port {port}; expected: 1 to 65535"
    ):
        AgentConfig("p1-1", port=port)


def test_a_taken_port_is_a_clear_error(make_rank, cache):
    port = int(make_rank("p0", SOURCE).agent.address.rpartition(":")[2])
    with pytest.raises(ConfigurationError, match="cannot listen on"):
        Agent(AgentConfig("p1", port=port), cache, print, open_transports("shm").transports, {})


def test_an_address_of_another_host_is_a_clear_error(cache):
    elsewhere = AgentConfig("p1", host="192.0.2.1", token=SharedToken(b"0123456789abcdef0123456789abcdef"))
    with pytest.raises(ConfigurationError, match="cannot listen on") as caught:
        Agent(elsewhere, cache, print, open_transports("shm").transports, {})
    assert "an address of this host" in caught.value.hint


def test_a_port_that_is_not_allowed_is_not_blamed_on_the_host(cache, monkeypatch):
    def refuse(*_):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(channel, "LimitedListener", refuse)
    with pytest.raises(ConfigurationError, match="cannot listen on") as caught:
        Agent(AgentConfig("p1", port=80), cache, print, open_transports("shm").transports, {})
    assert "--transfer-port" in caught.value.hint


def test_no_request_is_asked_for_twice_at_a_time_and_no_attempt_is_called_like_another(make_rank):
    source, target = make_rank("p0", SOURCE), make_rank("d0", TARGET)
    asked = []
    target.agent._submit = asked.append
    wanted = target.wanted(source, leased(source), TARGET_TABLES, NUM_TOKENS)
    target.agent.fetch(wanted)
    with pytest.raises(RequestError, match="has a fetch already"):
        target.agent.fetch(wanted)
    target.agent._event_loop.notify(BlocksReleased(wanted.request_id))
    target.agent.fetch(wanted)
    assert [each.request_id for each in asked] == [wanted.request_id] * 2
    assert len({each.claim_id for each in asked}) == 2
    with pytest.raises(RequestError, match="has a lease already"):
        leased(source)


def test_before_its_start_an_agent_says_so_and_has_kept_nothing(make_rank, cache):
    source = make_rank("p0", SOURCE)
    opened = open_transports("tcp")
    agent = Agent(AgentConfig("d0"), cache, print, opened.transports, opened.unavailable)
    wanted = source.wanted(source, leased(source), TARGET_TABLES, NUM_TOKENS)
    lease = LeaseRequest("r2", "l2", (), 0)
    for ask in (
        lambda: agent.fetch(wanted),
        lambda: agent.lease(lease),
        lambda: agent.hold(HoldRequest(wanted.reference, wanted.addresses)),
        lambda: agent.locate(source.agent.address),
    ):
        with pytest.raises(ConfigurationError, match="has not been started"):
            ask()
    with agent:
        agent.lease(lease)


def test_an_agent_is_woken_when_a_ticket_over_tcp_has_ended(cache):
    opened = open_transports("tcp")
    agent = Agent(AgentConfig("d0"), cache, print, opened.transports, opened.unavailable)
    with closing(agent):
        (tcp,), wakeup = opened.transports, agent._event_loop.wakeup
        assert not wakeup.consume()
        tcp._end(Completion(Ticket(1), ""))
        assert wakeup.consume()


def test_without_a_token_nobody_on_another_host_is_connected_to(make_rank):
    rank = make_rank("d0", TARGET)
    reference, elsewhere = Reference("p0", "epoch-1", "r1", "l1"), "tcp://192.0.2.1:5000"
    for ask in (
        lambda: rank.agent.fetch(FetchRequest("r1", reference, (elsewhere,), TARGET_TABLES, (TokenRange(0, 1),))),
        lambda: rank.agent.hold(HoldRequest(reference, (rank.agent.address, elsewhere))),
        lambda: rank.agent.locate(elsewhere),
    ):
        with pytest.raises(RequestError, match="connects to its own host only") as caught:
            ask()
        assert (caught.value.found, "--token-file" in caught.value.hint) == (elsewhere, True)


def test_an_agent_that_cannot_listen_gives_its_transports_up(make_rank, cache):
    port = int(make_rank("p0", SOURCE).agent.address.rpartition(":")[2])
    before = threading.active_count()
    (tcp,) = open_transports("tcp").transports
    assert threading.active_count() > before
    with pytest.raises(ConfigurationError, match="cannot listen on"):
        Agent(AgentConfig("p1", port=port), cache, print, [tcp], {})
    assert threading.active_count() == before


def test_only_loopback_without_authentication(cache):
    with pytest.raises(ConfigurationError, match="may listen on this host only"):
        Agent(AgentConfig("p1", host="0.0.0.0"), cache, print, open_transports("shm").transports, {})


def test_an_unknown_transport_is_a_clear_error():
    with pytest.raises(ConfigurationError, match=r"unknown transport; found: carrier-pigeon; expected: auto or one of"):
        open_transports("carrier-pigeon")
