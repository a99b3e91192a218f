"""What becomes of an answer whose engine breaks off, or whose client leaves, behind its last event."""

import pytest

from kvferry.http.request_fields import Endpoint
from kvferry.router.answers.answer_format import ANSWER_FORMATS
from kvferry.router.events import ClientGone, Ended, Failed
from kvferry.router.flow.relay import Relay

TOKEN, LAST = b'data: {"choices": []}\n\n', b"data: [DONE]\n\n"
BROKEN = Failed("reset", "the connection was reset")


class Stream:
    """An engine's stream, piece by piece."""

    status, is_event_stream = 200, True

    def __init__(self, *pieces) -> None:
        self._pieces = list(pieces)

    @property
    def is_over(self) -> bool:
        return not self._pieces

    async def piece(self):
        return self._pieces.pop(0)


class Reader:
    """A client that leaves when it is given its last piece, if there is one."""

    def __init__(self, last: bytes = b"") -> None:
        self._last, self.got = last, []

    async def start(self, status, headers) -> None:
        self.got.append(status)

    async def pass_on(self, data) -> None:
        self.got.append(data)
        if data == self._last:
            raise ConnectionResetError

    async def finish(self, data) -> None:
        self.got.append(data)


class Recorder:
    has_arrived = False

    def __init__(self) -> None:
        self.heard = []

    def hears(self, event, headers, handover_s) -> None:
        self.heard.append(event)


def relay(stream, reader, recorder) -> Relay:
    return Relay(stream, reader, recorder, None, ANSWER_FORMATS[Endpoint.CHAT], lambda piece, now: None)


@pytest.mark.parametrize(("before", "event"), [((TOKEN, LAST), Ended()), ((TOKEN,), BROKEN)])
async def test_an_engine_that_breaks_off_behind_the_last_event_is_not_to_blame(before, event):
    reader, recorder = Reader(), Recorder()
    assert await relay(Stream(*before, BROKEN), reader, recorder).run([], 100) == event
    assert recorder.heard == [event]
    assert reader.got == [200, *before, *([b""] if event == Ended() else [])]


@pytest.mark.parametrize(("last", "event"), [(b"more", Ended()), (LAST, ClientGone()), (TOKEN, ClientGone())])
async def test_a_client_that_leaves_behind_the_last_event_has_been_served(last, event):
    """One that leaves before that event was written to it has not."""
    recorder = Recorder()
    passing = relay(Stream(TOKEN, LAST, b"more", b""), Reader(last), recorder)
    with pytest.raises(ConnectionResetError):
        await passing.run([], 100)
    assert passing.left() == event
    assert recorder.heard == ([Ended()] if event == Ended() else [])


async def test_an_end_is_told_once():
    recorder = Recorder()
    passing = relay(Stream(TOKEN, LAST, b""), Reader(), recorder)
    assert await passing.run([], 100) == Ended()
    assert passing.left() == Ended()
    assert recorder.heard == [Ended()]
