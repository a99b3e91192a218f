"""The manager over transports that do what a test wants: every end of a ticket reaches the read it belongs to."""

import ctypes

import numpy as np
import pytest
from msgspec import structs

from kvferry.agent.memory.peer_slots import PeerSlots
from kvferry.agent.transports.costs import DEVICE_SLOT_S
from kvferry.agent.transports.manager import AT_ONCE, TransportManager
from kvferry.errors import TransportError
from kvferry.plan.description.describe import EngineShape, describe
from kvferry.plan.description.model import attention
from kvferry.plan.programs.copies import Copies
from kvferry.session.commands import Post
from kvferry.session.events import PeerConnected, PeerMoved, PeerUnreachable, TicketEnded
from kvferry.session.keys import PeerKey, ReadKey
from kvferry.transport.base import Completion, Direction, Memory, Ticket
from kvferry.transport.machine.facts import Place
from kvferry.transport.selection.diagnosis import LocalContext
from kvferry.transport.selection.probe import NUM_MARKS, PROBE_BYTES, allocation_bytes, fill_probe
from kvferry.transport.shm.shared_memory import allocate_shared
from kvferry.wire.codec import decode, encode
from kvferry.wire.messages import Offer, Party, Probe, TargetOffer, TransportOffer

PEER = PeerKey("tcp://127.0.0.1:1", "p0", "e1")
KEY = ReadKey("q1", PEER)
NO_ROWS = Copies(*(np.empty(0, np.uint64) for _ in range(3)), pieces=0)
PROBE = np.empty(1 << 16, np.uint8)
TESTS_S = 4.5
fill_probe(PROBE, 7)
(LAYOUT,) = describe(attention(1, 1, 1, "int8", 1), EngineShape(1, 1, 1, 1, "token-major"), 1 << 20)


class Scripted:
    """A transport in this process: reads probes at once, holds other tickets until told how they end."""

    def __init__(self, name, refuses=()):
        self.name = name
        self.copies_once = name in ("memory", "shm", "cma")
        self.progress_interval_s = float("inf")
        self.refuses = refuses
        self.reported = ""
        self.connected, self.cancelled, self.registered, self.ended, self.open = set(), [], [], [], []
        self.is_closed = False
        self.num_moved = 0
        self.numbers = iter(range(1, 1000))

    def register(self, memory):
        if "register" in self.refuses:
            raise TransportError("cannot register")
        self.registered.append(memory)

    def unregister(self, memory):
        self.registered.remove(memory)

    def descriptor(self):
        if "descriptor" in self.refuses:
            raise TransportError("cannot describe")
        return self.name.encode()

    def connect(self, peer, descriptor):
        if "connect" in self.refuses:
            raise TransportError("cannot connect")
        assert descriptor == self.name.encode()
        self.connected.add(peer)

    def carriers(self, peer):
        return (self.reported or self.name,)

    def disconnect(self, peer):
        self.connected.discard(peer)

    def post(self, peer, copies, direction):
        assert direction is Direction.READ
        if "post" in self.refuses:
            raise TransportError("cannot post")
        ticket = Ticket(next(self.numbers))
        if len(copies):
            self.read(copies)
            self.ended.append(Completion(ticket, ""))
        else:
            self.open.append(ticket)
        return ticket

    def read(self, copies):
        (scratch,) = self.registered[-1:]
        view = np.ctypeslib.as_array((np.ctypeslib.ctypes.c_uint8 * scratch.size_bytes).from_address(scratch.address))
        for source, target, length in zip(
            *(c.tolist() for c in (copies.source, copies.target, copies.length)), strict=True
        ):
            start = source - PROBE.ctypes.data
            view[target - scratch.address :][:length] = PROBE[start : start + length]

    def cancel(self, ticket):
        self.cancelled.append(ticket)

    def poll(self):
        ended, self.ended = self.ended, []
        return ended

    def moved(self, peer):
        return self.num_moved

    def close(self):
        self.is_closed = True


class Notifying(Scripted):
    """One that says when a ticket has ended."""

    def notify_with(self, notify):
        self.notify = notify


class Writing(Scripted):
    """One that also writes, unless it refuses to."""

    def post(self, peer, copies, direction):
        if direction is Direction.WRITE and "write" in self.refuses:
            raise TransportError("Operation not permitted")
        for source, target, length in zip(copies.source, copies.target, copies.length, strict=True):
            ctypes.memmove(int(target), int(source), int(length))
        ticket = Ticket(next(self.numbers))
        self.ended.append(Completion(ticket, ""))
        return ticket


class Refusing(Scripted):
    """One that can refuse what a peer asks for."""

    def __init__(self, name):
        super().__init__(name)
        self.given, self.revoked = [], []

    def descriptor_for(self, peer, descriptor):
        self.given.append(peer)
        return descriptor + b" for one"

    def revoke(self, peer):
        self.revoked.append(peer)


def offer(*names):
    transports = tuple(TransportOffer(name, name.encode(), "") for name in names)
    return Offer(Party("p0", "e1", 0), LAYOUT, transports, Probe(PROBE.ctypes.data, PROBE.size, 7))


def outcomes(manager):
    """Everything that comes out until nothing is under way."""
    events = []
    while manager.busy:
        events += manager.poll()
    return events


@pytest.fixture
def connected():
    transport = Scripted("shm")
    manager = TransportManager("shm", [transport], {}, TESTS_S)
    manager.connect(PEER, offer("shm"))
    (event,) = outcomes(manager)
    assert isinstance(event, PeerConnected)
    return manager, transport


def test_a_read_ends_as_its_ticket_ends(connected):
    manager, transport = connected
    manager.post(Post(KEY, NO_ROWS))
    assert manager.poll() == []
    transport.ended = [Completion(transport.open[0], "cable cut"), Completion(Ticket(999), "not ours")]
    assert manager.poll() == [TicketEnded(KEY, "cable cut")]
    assert not manager.busy


def test_what_is_posted_is_looked_at_again_at_once_and_so_is_what_is_left_when_one_has_ended(connected):
    """Some transports copy in `poll`, one ticket at a time."""
    manager, transport = connected
    other = ReadKey("q2", PEER)
    for key in (KEY, other):
        manager.post(Post(key, NO_ROWS))
    assert manager.must_poll_now
    assert manager.poll() == []
    assert not manager.must_poll_now
    transport.ended = [Completion(transport.open[0], "")]
    assert manager.poll() == [TicketEnded(KEY, "")]
    assert manager.must_poll_now
    transport.ended = [Completion(transport.open[1], "")]
    assert manager.poll() == [TicketEnded(other, "")]
    assert not manager.must_poll_now


@pytest.mark.parametrize(("kind", "must_be_polled"), [(Scripted, True), (Notifying, False)])
def test_who_says_when_a_ticket_has_ended_need_not_be_polled_for_that(kind, must_be_polled):
    transport, told = kind("tcp"), []
    manager = TransportManager("tcp", [transport], {}, TESTS_S)
    manager.notify_with(lambda: told.append("an end"))
    manager.connect(PEER, offer("tcp"))
    assert manager.must_be_polled
    outcomes(manager)
    assert not manager.must_be_polled
    manager.post(Post(KEY, NO_ROWS))
    assert manager.poll() == []
    assert (manager.busy, manager.must_be_polled) == (True, must_be_polled)
    if not must_be_polled:
        transport.notify()
        assert told == ["an end"]
    manager.post(Post(ReadKey("q2", PeerKey("tcp://127.0.0.1:2", "p0", "e1")), NO_ROWS))
    assert manager.must_be_polled


@pytest.mark.parametrize("is_written", [True, False])
def test_what_can_only_read_a_peer_is_not_all_that_is_tried_where_it_is_to_be_written(is_written):
    """As where the system forbids process_vm_writev alone."""
    memory, party = np.empty(allocation_bytes(), np.uint8), Party("d0", "e1", 0)
    fill_probe(memory[:PROBE_BYTES], 7)
    transports = [Writing("cma", refuses=("write",)), Writing("tcp")]
    manager = TransportManager("auto", transports, {}, TESTS_S)
    offered = structs.replace(offer("cma", "tcp"), probe=Probe(memory.ctypes.data, PROBE_BYTES, 7, num_marks=NUM_MARKS))
    if is_written:
        manager.connect(party, TargetOffer(party, (LAYOUT,), offered.transports, offered.probe))
    else:
        manager.connect(PEER, offered)
    (event,) = outcomes(manager)
    assert event.transport == ("tcp" if is_written else "cma")


@pytest.mark.parametrize("end", ["disconnected", "closed"])
def test_slots_of_a_target_are_attached_while_it_is_known(end):
    theirs, party = allocate_shared(1 << 16, "target"), Party("d0", "e1", 0)
    known, far = offer("shm"), PeerSlots(Memory(1 << 20, 1 << 16, -1))
    manager = TransportManager("shm", [Scripted("shm")], {}, TESTS_S, peer_slots=far)
    staging = PeerSlots(theirs.memory).descriptor
    manager.connect(party, TargetOffer(party, (LAYOUT,), known.transports, known.probe, staging))
    (connected,) = outcomes(manager)
    assert connected.reaches_staging
    assert far.find(party, theirs.memory.address, 4096) is not None
    if end == "closed":
        far.close()
    else:
        manager.disconnect(party)
        assert not far.reaches(party)
    assert far.find(party, theirs.memory.address, 4096) is None
    theirs.close()


def test_a_source_that_is_to_write_gets_access_of_its_own_until_that_is_revoked():
    """To what was registered at the start, whatever is registered when it is offered."""
    refusing, shm = Refusing("tcp"), Scripted("shm")
    manager, source = TransportManager("auto", [refusing, shm], {"cma": "no"}, TESTS_S), Party("p0", "e1", 0)
    assert manager.revocable == {"tcp"}
    offers = manager.offers()
    assert [each.descriptor for each in offers] == [b"tcp", b"shm", b""]
    shm.refuses = refusing.refuses = ("descriptor",)
    found = manager.with_access((*offers, TransportOffer("tcp", b"", "gone")), source)
    assert [each.descriptor for each in found] == [b"tcp for one", b"shm", b"", b""]
    manager.disconnect(PEER)
    assert not refusing.revoked
    manager.revoke(source)
    assert refusing.revoked == refusing.given


def test_a_cancelled_read_still_ends(connected):
    manager, transport = connected
    manager.post(Post(KEY, NO_ROWS))
    manager.cancel(KEY)
    assert transport.cancelled == transport.open
    assert manager.busy
    transport.ended = [Completion(transport.open[0], "")]
    assert manager.poll() == [TicketEnded(KEY, "")]


def test_a_read_that_cannot_be_posted_ends_with_the_reason(connected):
    manager, transport = connected
    transport.refuses = ("post",)
    manager.post(Post(KEY, NO_ROWS))
    (ended,) = manager.poll()
    assert "cannot post" in ended.error


def test_a_read_from_a_lost_peer_ends_with_an_error(connected):
    manager, transport = connected
    manager.disconnect(PEER)
    assert transport.connected == set()
    manager.post(Post(KEY, NO_ROWS))
    (ended,) = manager.poll()
    assert ended.error


def test_only_the_chosen_transport_stays_connected():
    transports = [Scripted("nixl"), Scripted("tcp"), Scripted("shm", refuses=("connect",))]
    manager = TransportManager("auto", transports, {}, TESTS_S)
    manager.connect(PEER, offer("shm", "tcp", "nixl"))
    (event,) = outcomes(manager)
    assert "shm failed (cannot connect)" in event.choice
    assert [t.name for t in transports if t.connected] == [event.transport]
    assert all(not t.registered for t in transports)


def test_what_cannot_be_better_is_never_connected():
    transports = [Scripted("cma"), Scripted("tcp", refuses=("connect",))]
    manager = TransportManager("auto", transports, {}, TESTS_S)
    manager.connect(PEER, offer("cma", "tcp"))
    (event,) = outcomes(manager)
    assert (event.transport, "tcp not tested" in event.choice, "tcp failed" in event.choice) == ("cma", True, False)


def test_no_transport_that_works_is_an_outcome():
    manager = TransportManager("auto", [Scripted("shm", refuses=("connect",))], {"tcp": "no sockets today"}, TESTS_S)
    manager.connect(PEER, offer("shm", "tcp"))
    (event,) = outcomes(manager)
    assert isinstance(event, PeerUnreachable)
    manager.connect(PEER, offer("tcp"))
    (event,) = outcomes(manager)
    assert "no sockets today" in event.error


def test_a_long_reason_why_a_transport_is_missing_fits_into_an_offer():
    """Otherwise nobody could read the offer, and the other transports would be missing, too."""
    manager = TransportManager("auto", [Scripted("shm")], {"tcp": "no " * 5000}, TESTS_S)
    _, missing = decode(encode(Offer(Party("p0", "e1", 0), LAYOUT, manager.offers(), Probe(0, 0, 0)))).transports
    assert missing.unavailable.startswith("no no")


def test_a_peer_that_is_lost_while_it_is_being_tested_has_no_outcome():
    first, second = Scripted("shm"), Scripted("tcp")
    manager = TransportManager("auto", [first, second], {}, TESTS_S)
    manager.connect(PEER, offer("shm", "tcp"))
    assert manager.poll() == []
    manager.disconnect(PEER)
    assert outcomes(manager) == []
    assert not first.connected
    assert not second.connected


def test_a_test_that_was_given_up_posts_nothing_to_who_has_the_name_next():
    fresh, used = Scripted("shm"), Scripted("shm")
    again = TransportManager("auto", [used], {}, TESTS_S)
    again.connect(PEER, offer("shm"))
    again.poll()
    again.disconnect(PEER)
    num_posted = next(used.numbers)
    for manager in (TransportManager("auto", [fresh], {}, TESTS_S), again):
        manager.connect(PEER, offer("shm"))
        assert len(outcomes(manager)) == 1
    assert next(used.numbers) - num_posted == next(fresh.numbers)


def test_a_transport_that_cannot_be_described_is_not_offered_but_still_used():
    """Memory that peers cannot reach in this way can still be filled by it."""
    silent = Scripted("shm", refuses=("descriptor",))
    manager = TransportManager("auto", [silent], {}, TESTS_S)
    assert [(offer.name, offer.unavailable) for offer in manager.offers()] == [("shm", "cannot describe")]
    assert not silent.is_closed


def test_a_transport_that_cannot_take_the_memory_is_not_offered():
    broken = Scripted("nixl", refuses=("register",))
    manager = TransportManager("auto", [broken, Scripted("tcp")], {"shm": "other host"}, TESTS_S)
    manager.register([Memory(4096, 4096, -1)])
    assert broken.is_closed
    assert {o.name: o.unavailable for o in manager.offers()} == {
        "tcp": "",
        "nixl": "cannot register",
        "shm": "other host",
    }


def test_bytes_that_move_are_told_of_once_a_second(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("kvferry.agent.transports.manager.time.monotonic", lambda: now[0])
    slow = Scripted("nixl")
    manager = TransportManager("nixl", [slow], {}, TESTS_S)
    manager.connect(PEER, offer("nixl"))
    outcomes(manager)
    manager.post(Post(KEY, NO_ROWS))
    told = []
    # Before anything is asked for, bytes of before are nothing new.
    for at, num_moved in ((101.0, 5), (101.5, 6), (102.0, 7), (103.5, 7), (105.0, 9)):
        now[0], slow.num_moved = at, num_moved
        told += [(at, event) for event in manager.poll()]
    assert told == [(102.0, PeerMoved(PEER)), (105.0, PeerMoved(PEER))]
    slow.ended = [Completion(slow.open[0], "")]
    now[0], slow.num_moved = 107.0, 20
    assert manager.poll() == [TicketEnded(KEY, "")]


@pytest.mark.parametrize("buffer_device", ["cpu", "cuda"])
def test_a_row_costs_what_the_registered_memory_makes_of_it(buffer_device):
    context = LocalContext("this host", buffer_device=buffer_device)
    manager = TransportManager("auto", [Scripted("shm")], {}, TESTS_S, context)
    offered = offer("shm")
    manager.connect(PEER, structs.replace(offered, probe=structs.replace(offered.probe, host="this host")))
    (event,) = outcomes(manager)
    assert (event.costs.launch_s == DEVICE_SLOT_S) == (buffer_device == "cuda")


def test_a_slow_way_between_engines_of_one_host_is_told_by_log_and_counter(caplog):
    slow = Scripted("nixl")
    slow.reported = "tcp/lo"
    manager = TransportManager("auto", [slow], {}, TESTS_S, LocalContext("this host"))
    offered = offer("nixl")
    host = structs.replace(offered, probe=structs.replace(offered.probe, host="this host"))
    manager.connect(PEER, host)
    (event,) = outcomes(manager)
    assert "nixl over tcp/lo" in event.choice
    (met,) = manager.met.values()
    assert (met.place, met.transport, [each.carriers for each in met.measurements]) == (
        Place.SAME_HOST,
        "nixl",
        [("tcp/lo",)],
    )
    assert "a slower transport" in caplog.text
    assert "hint: run both engines as one user" in caplog.text
    assert manager.take_counts() == {("transport_warnings", "nixl"): 1}
    assert manager.take_counts() == {}
    manager.disconnect(PEER)
    assert manager.met == {}
    manager.connect(PEER, offered)
    outcomes(manager)
    assert manager.take_counts() == {}


class Slow(Scripted):
    """Takes 20 ms for each copy, on a clock of its own, and never ends those from silent peers."""

    COPY_S = 0.02

    def __init__(self):
        super().__init__("shm")
        self.now, self.due, self.most_at_once = 0.0, [], 0

    def read(self, copies):
        (scratch,) = (each for each in self.registered if 0 <= int(copies.target[0]) - each.address < each.size_bytes)
        self.registered.append(scratch)
        super().read(copies)
        self.registered.pop()

    def post(self, peer, copies, direction):
        ticket = super().post(peer, copies, direction)
        self.due += [(self.now + self.COPY_S, completion) for completion in self.ended if "silent" not in peer]
        self.ended = []
        if self.now < 0.5:
            self.most_at_once = max(self.most_at_once, sum(due > self.now for due, _ in self.due))
        return ticket

    def poll(self):
        self.now += 0.004
        self.ended = [completion for due, completion in self.due if due <= self.now]
        self.due = [each for each in self.due if each[0] > self.now]
        return super().poll()


@pytest.mark.parametrize(("num_peers", "num_silent"), [(2, 0), (100, 0), (2, 300)])
def test_peers_that_are_met_at_once_are_measured_one_by_one_as_long_as_there_is_time(
    monkeypatch, num_peers, num_silent
):
    transport = Slow()
    monkeypatch.setattr("kvferry.agent.transports.manager.time.monotonic", lambda: transport.now)
    manager = TransportManager("shm", [transport], {}, TESTS_S)
    keys = [PeerKey(f"tcp://silent:{number}", f"s{number}", "e1") for number in range(num_silent)]
    keys += [PeerKey(f"tcp://127.0.0.1:{number}", f"p{number}", "e1") for number in range(num_peers)]
    for key in keys:
        manager.connect(key, offer("shm"))
    events = []
    while len(events) < num_peers:
        events += manager.poll()
    assert transport.now < TESTS_S / 2
    assert {event.peer for event in events if isinstance(event, PeerConnected)} == set(keys[num_silent:])
    assert transport.most_at_once <= 1


def test_only_a_few_peers_are_tested_at_a_time_and_the_first_to_come_first(monkeypatch):
    """Each test takes memory, and time of the thread that serves everything else."""
    transport, most = Slow(), 0
    monkeypatch.setattr("kvferry.agent.transports.manager.time.monotonic", lambda: transport.now)
    manager = TransportManager("shm", [transport], {}, TESTS_S)
    keys = [PeerKey(f"tcp://127.0.0.1:{number}", f"p{number}", "e1") for number in range(60)]
    for key in keys:
        manager.connect(key, offer("shm"))
    manager.disconnect(keys[-1])
    events = []
    while manager.busy:
        events += manager.poll()
        most = max(most, len(transport.registered))
    assert [event.peer for event in events] == keys[:-1]
    assert most == AT_ONCE
    assert not transport.registered


def test_no_nap_is_taken_where_a_test_has_another_copy_to_make(monkeypatch):
    transport = Slow()
    monkeypatch.setattr("kvferry.agent.transports.manager.time.monotonic", lambda: transport.now)
    manager = TransportManager("shm", [transport], {}, TESTS_S)
    manager.connect(PeerKey("tcp://127.0.0.1:1", "p1", "e1"), offer("shm"))
    assert not manager.poll()
    for _ in range(1000):
        if manager.poll():
            break
        assert manager.must_poll_now or transport.due
    assert not manager.must_poll_now
    assert manager.met
