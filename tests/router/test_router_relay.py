"""What becomes of an answer whose engine breaks off, or whose client leaves, behind its last event."""

import pytest

from kvferry.http.request_fields import Endpoint
from kvferry.router.answers.answer_format import ANSWER_FORMATS
from kvferry.router.events import ClientGone, Ended, Failed
from kvferry.router.flow.relay import Relay

TOKEN, LAST, MORE = b'data: {"choices": []}\n\n', b"data: [DONE]\n\n", b": more\n\n"
FAILED = b'data: {"error": {"message": "no memory", "code": 500}}\n\n'
# A refusal of the request, and what only looks like an error.
NO_FAILURES = [FAILED.replace(b"500", b"400"), b'data: {"error": null}\n\n', b'data: {"text": "\\"error\\""}\n\n']
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


@pytest.mark.parametrize(("last", "event"), [(MORE, Ended()), (LAST, ClientGone()), (TOKEN, ClientGone())])
async def test_a_client_that_leaves_behind_the_last_event_has_been_served(last, event):
    """One that leaves before that event was written to it has not."""
    recorder = Recorder()
    passing = relay(Stream(TOKEN, LAST, MORE, b""), Reader(last), recorder)
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


@pytest.mark.parametrize("behind", [(), (LAST,)])
async def test_an_answer_that_ends_with_an_error_of_the_engine_has_failed(behind):
    """vLLM ends such a stream as it ends any other."""
    reader, recorder = Reader(), Recorder()
    event = await relay(Stream(TOKEN, FAILED, *behind, b""), reader, recorder).run([], 100)
    assert (event.reason, event.is_told) == ("status_500", True)
    assert recorder.heard == [event]
    assert reader.got == [200, TOKEN, FAILED, *behind, b""]


@pytest.mark.parametrize("told", NO_FAILURES)
async def test_what_is_no_error_of_the_engine_is_no_failure(told):
    assert await relay(Stream(TOKEN, told, LAST, b""), Reader(), Recorder()).run([], 100) == Ended()


async def test_a_client_that_leaves_behind_an_error_of_the_engine_has_not_been_served():
    passing = relay(Stream(TOKEN, FAILED + LAST, MORE, b""), Reader(MORE), Recorder())
    with pytest.raises(ConnectionResetError):
        await passing.run([], 100)
    assert passing.left().reason == "status_500"
