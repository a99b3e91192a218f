"""An engine whose memory is in more pieces than peers take does not start."""

import numpy as np
import pytest

from kvferry.agent.transports.manager import TransportManager
from kvferry.errors import ConfigurationError
from kvferry.transport import registered_memory
from kvferry.transport.base import Memory
from kvferry.transport.cma.transport import CrossMemoryTransport


def manager_with(num_pieces):
    buffer = np.zeros((num_pieces, 100), np.uint8)
    manager = TransportManager("cma", [CrossMemoryTransport()], {}, 4.5)
    manager.register([Memory(int(piece.ctypes.data), 100, -1) for piece in buffer])
    return manager


def test_more_pieces_than_peers_take_are_an_error_at_the_start(monkeypatch):
    monkeypatch.setattr(registered_memory, "MAX_REGIONS", 2)
    manager_with(2).check_requested()
    with pytest.raises(ConfigurationError, match="register fewer, larger pieces of memory"):
        manager_with(3).check_requested()
