"""The contract of transports between processes: one transport here, its peer in another process that can be killed.

Each check is a function of a transport that has just been made and of its name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from kvferry.plan.programs.copies import Copies
from kvferry.testing.transports.peer import PeerProcess, digest
from kvferry.testing.transports.world import finish
from kvferry.transport.base import Completion, Direction, Memory, Transport
from kvferry.transport.registered_memory import View
from kvferry.transport.selection.self_test import fill_probe

SMALL_BYTES = 96 << 10
PROCESS_BYTES = 24 << 20
SEED = 7

ProcessCheck = Callable[[Transport, str], None]


def reads_from_another_process(transport: Transport, name: str) -> None:
    with PeerProcess(name, PROCESS_BYTES, SEED) as peer, _private(transport, PROCESS_BYTES) as buffer:
        transport.connect("peer", peer.descriptor)
        ticket = transport.post("peer", _rows_of(peer, buffer), Direction.READ)
        assert finish(transport, [ticket])[ticket].error == ""
        assert digest(buffer) == peer.digest()


def writes_to_another_process(transport: Transport, name: str) -> None:
    with PeerProcess(name, PROCESS_BYTES, SEED) as peer, _private(transport, PROCESS_BYTES) as buffer:
        fill_probe(buffer, SEED + 1)
        transport.connect("peer", peer.descriptor)
        rows = _rows_of(peer, buffer)
        ticket = transport.post("peer", Copies(rows.target, rows.source, rows.length, len(rows)), Direction.WRITE)
        assert finish(transport, [ticket])[ticket].error == ""
        assert digest(buffer) == peer.digest()


def a_peer_killed_before_a_read_is_an_error_or_its_bytes(transport: Transport, name: str) -> None:
    with PeerProcess(name, PROCESS_BYTES, SEED) as peer, _private(transport, PROCESS_BYTES) as buffer:
        transport.connect("peer", peer.descriptor)
        peer.kill()
        ticket = transport.post("peer", _rows_of(peer, buffer), Direction.READ)
        _expect_error_or_bytes(finish(transport, [ticket])[ticket], buffer)
        transport.disconnect("peer")


def a_peer_killed_during_a_read_is_an_error_or_its_bytes(transport: Transport, name: str) -> None:
    with PeerProcess(name, PROCESS_BYTES, SEED) as peer, _private(transport, PROCESS_BYTES) as buffer:
        transport.connect("peer", peer.descriptor)
        first = transport.post("peer", _rows_of(peer, buffer), Direction.READ)
        finish(transport, [first])
        buffer.fill(0)
        peer.stop()  # It cannot answer any more, so the read is under way when it dies.
        second = transport.post("peer", _rows_of(peer, buffer), Direction.READ)
        ended = transport.poll()
        peer.kill()
        completion = ended[0] if ended else finish(transport, [second])[second]
        _expect_error_or_bytes(completion, buffer)
        transport.disconnect("peer")


def a_restarted_process_can_be_connected_again(transport: Transport, name: str) -> None:
    for seed in (1, 2):
        with PeerProcess(name, SMALL_BYTES, seed) as peer, _private(transport, SMALL_BYTES) as buffer:
            transport.connect("peer", peer.descriptor)
            ticket = transport.post("peer", _rows_of(peer, buffer), Direction.READ)
            assert finish(transport, [ticket])[ticket].error == ""
            assert digest(buffer) == peer.digest()


PROCESS_CONTRACT: tuple[ProcessCheck, ...] = (
    reads_from_another_process,
    writes_to_another_process,
    a_peer_killed_before_a_read_is_an_error_or_its_bytes,
    a_peer_killed_during_a_read_is_an_error_or_its_bytes,
    a_restarted_process_can_be_connected_again,
)


@contextmanager
def _private(transport: Transport, num_bytes: int) -> Iterator[View]:
    """Memory of this process, registered while it is used."""
    buffer = np.zeros(num_bytes, np.uint8)
    memory = Memory(int(buffer.ctypes.data), num_bytes, -1)
    transport.register(memory)
    yield buffer
    transport.unregister(memory)


def _rows_of(peer: PeerProcess, buffer: View) -> Copies:
    """All of the peer's memory, in rows of 4 KiB."""
    start = np.arange(0, buffer.size, 4096, dtype=np.uint64)
    length = np.minimum(np.uint64(4096), np.uint64(buffer.size) - start)
    source = start + np.uint64(peer.probe.address)
    return Copies(source, start + np.uint64(buffer.ctypes.data), length, len(start))


def _expect_error_or_bytes(completion: Completion, buffer: View) -> None:
    expected = np.empty_like(buffer)
    fill_probe(expected, SEED)
    assert completion.error or np.array_equal(buffer, expected)
