"""What it costs to ask many sockets whether there is something to read."""

from __future__ import annotations

import zmq

from kvferry.agent.control import poller as poller_module
from kvferry.agent.control.poller import Poller


def test_sockets_that_are_not_used_are_not_asked(monkeypatch):
    asked = []
    can_be_read = poller_module._can_be_read

    def noted(socket):
        asked.append(socket)
        return can_be_read(socket)

    monkeypatch.setattr(poller_module, "_can_be_read", noted)
    context, poller = zmq.Context(), Poller()
    try:
        sockets = [context.socket(zmq.DEALER) for _ in range(50)]
        for socket in sockets:
            poller.register(socket)
        # Each may have had something to read before it was watched.
        assert poller.poll(0.0) == set()
        assert len(asked) >= len(sockets)
        asked.clear()
        poller.note_used(sockets[7])
        assert poller.poll(0.0) == set()
        assert poller.poll(0.0) == set()
        assert asked == [sockets[7]]
    finally:
        context.destroy(linger=0)
        poller.close()
