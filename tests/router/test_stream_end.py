"""When a client of a stream has all of it, however the bytes were cut."""

import pytest

from kvferry.http.request_fields import Endpoint
from kvferry.router.answers.answer_format import ANSWER_FORMATS, StreamEnd

CHUNK = b'data: {"choices": [{"text": "data: [DONE]\\n\\n"}]}'
COMPLETED = b'event: response.completed\ndata: {"response": "' + b"x" * 200 + b'"}'
LAST = [
    (Endpoint.COMPLETIONS, b"data: [DONE]"),
    (Endpoint.CHAT, b"data:[DONE]"),
    (Endpoint.RESPONSES, COMPLETED),
    (Endpoint.RESPONSES, b"event: response.incomplete\ndata: {}"),
    (Endpoint.MESSAGES, b"event: message_stop\ndata: {}"),
]


def is_over(endpoint, *pieces):
    """After each of these pieces."""
    end, found = StreamEnd(ANSWER_FORMATS[endpoint]), []
    for piece in pieces:
        end.feed(piece)
        found.append(end.is_over)
    return found


@pytest.mark.parametrize("line", [b"\n", b"\r\n"], ids=["LF", "CRLF"])
@pytest.mark.parametrize(("endpoint", "last"), LAST)
def test_the_last_event_is_over_with_its_blank_line(endpoint, last, line):
    stream = line.join((CHUNK, b"", *last.split(b"\n"), b"", b""))
    for cut in range(len(stream)):
        assert is_over(endpoint, stream[:cut], stream[cut:]) == [False, True], cut
    each = [stream[at : at + 1] for at in range(len(stream))]
    assert is_over(endpoint, *each) == [False] * (len(stream) - 1) + [True]
    # Whatever follows.
    assert is_over(endpoint, stream, b"x" * 1000, b"x") == [True, True, True]


LIKE_IT = (
    CHUNK + b"\n\n",
    b"event: response.completed.not\n\n",
    b"event: message_stop\n",
    b"x data: [DONE]\n\n",
    b"\n\n\n\n",
    # An engine that fails has not served.
    b"event: response.failed\ndata: {}\n\n",
    b"event: error\ndata: {}\n\n",
)


@pytest.mark.parametrize("events", LIKE_IT)
@pytest.mark.parametrize("endpoint", ANSWER_FORMATS)
def test_what_only_looks_like_it_is_not_the_end(endpoint, events):
    assert is_over(endpoint, events) == [False]
