"""The self-test of a transport between two processes of this machine."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing

from kvferry.errors import FerryError
from kvferry.testing.transports.peer import PeerProcess
from kvferry.transport.base import Transport
from kvferry.transport.selection.measurement import Measurement
from kvferry.transport.selection.probe import PROBE_BYTES
from kvferry.transport.selection.self_test import measure

SEED = 7
PEER = "peer"


def measured(name: str, opener: Callable[[str], Transport]) -> Measurement:
    """Read from and write to a process that is started for that; why it was impossible is in the measurement."""
    try:
        with closing(opener("127.0.0.1")) as transport, PeerProcess(name, PROBE_BYTES, SEED) as peer:
            transport.connect(PEER, peer.descriptor)
            return measure(transport, PEER, peer.probe)
    except FerryError as error:
        return Measurement.failed(name, str(error))
