"""What arrives on a connection to an engine, read whatever pieces it comes in."""

from __future__ import annotations

import gc
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.errors import PeerError
from kvferry.router.upstream.response_parser import MAX_IDLE_BYTES, Reply

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n"
bodies = st.lists(st.binary(min_size=1, max_size=200), max_size=6)


def chunked(pieces) -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


def fed(*parts: bytes) -> tuple[Reply, bytes]:
    reply, body = Reply(), b""
    for part in parts:
        reply.feed(part)
        body += reply.take()
    return reply, body


def cut(data: bytes, cuts) -> list[bytes]:
    ends = sorted({end % (len(data) + 1) for end in cuts} | {0, len(data)})
    return [data[a:b] for a, b in itertools.pairwise(ends)]


@given(bodies, st.booleans(), st.lists(st.integers(0, 4000), max_size=8))
def test_where_the_pieces_end_makes_no_difference(pieces, is_chunked, cuts):
    body = b"".join(pieces)
    rest = chunked(pieces) if is_chunked else body
    length = b"Transfer-Encoding: chunked" if is_chunked else b"Content-Length: %d" % len(body)
    reply, found = fed(*cut(HEAD + length + b"\r\n\r\n" + rest, cuts))
    assert (reply.status, found, reply.is_whole, reply.can_go_on) == (200, body, True, True)
    assert reply.headers == [(b"Content-Type", b"text/plain"), tuple(length.split(b": "))]
    assert reply.num_waiting_bytes == 0


@given(bodies, st.lists(st.integers(0, 4000), max_size=8))
def test_a_body_without_an_end_of_its_own_ends_with_the_connection(pieces, cuts):
    body = b"".join(pieces)
    reply, found = fed(*cut(HEAD + b"\r\n" + body, cuts))
    assert (found, reply.is_whole) == (body, False)
    reply.end()
    assert (reply.is_whole, reply.can_go_on) == (True, False)


@pytest.mark.parametrize("rest", [b"Content-Length: 5\r\n\r\nhalf", b"Transfer-Encoding: chunked\r\n\r\n4\r\nhalf\r\n"])
def test_half_an_answer_is_never_whole(rest):
    reply, found = fed(HEAD + rest)
    reply.end()
    assert (found, reply.is_whole) == (b"half", False)


def test_a_head_alone_is_not_whole():
    reply, _ = fed(HEAD)
    reply.end()
    assert (reply.status, reply.is_whole) == (0, False)


@pytest.mark.parametrize("status", [b"204 No Content", b"304 Not Modified"])
def test_some_answers_have_no_body(status):
    reply, found = fed(b"HTTP/1.1 " + status + b"\r\n\r\n")
    assert (found, reply.is_whole, reply.can_go_on) == (b"", True, True)


def test_what_comes_before_the_answer_is_passed_over():
    early = b"HTTP/1.1 100 Continue\r\nX-Early: 1\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: a\r\n\r\n"
    reply, found = fed(early + HEAD + b"Content-Length: 2\r\n\r\nok")
    assert (reply.status, found, reply.can_go_on) == (200, b"ok", True)
    assert [name for name, _ in reply.headers] == [b"Content-Type", b"Content-Length"]


def test_trailers_are_no_headers():
    trailers = b"Transfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\nX-Late: 1\r\n\r\n"
    reply, found = fed(HEAD + trailers)
    assert (found, reply.is_whole) == (b"ok", True)
    assert b"X-Late" not in dict(reply.headers)


@pytest.mark.parametrize("head", [b"HTTP/1.1 200 OK\r\nConnection: close\r\n", b"HTTP/1.0 200 OK\r\n"])
def test_a_server_that_closes_is_not_asked_again(head):
    reply, found = fed(head + b"Content-Length: 2\r\n\r\nok")
    assert (found, reply.is_whole, reply.can_go_on) == (b"ok", True, False)


@pytest.mark.parametrize("more", [b"x", b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nbad", b"\0"])
@pytest.mark.parametrize("at_once", [True, False])
def test_more_than_was_asked_for_spoils_the_connection_and_not_the_answer(more, at_once):
    answer = HEAD + b"Content-Length: 2\r\n\r\nok"
    reply, found = fed(answer + more) if at_once else fed(answer, more)
    assert (reply.status, found, reply.is_whole, reply.can_go_on) == (200, b"ok", True, False)


@pytest.mark.parametrize(
    "data",
    [
        b"what is this\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n",
        HEAD + b"Content-Length: x\r\n\r\n",
        HEAD + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
    ],
)
def test_what_is_no_http_is_refused(data):
    with pytest.raises(PeerError, match="does not speak"):
        fed(data)


@pytest.mark.parametrize("start", [b"", b"Transfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n"])
def test_a_head_or_trailers_without_end_are_refused(start):
    with pytest.raises(PeerError, match="too long"):
        fed(HEAD + start, *(b"X-%d: %s\r\n" % (i, b"y" * 1000) for i in range(MAX_IDLE_BYTES // 1000 + 1)))


def test_a_long_body_in_small_chunks_is_no_head():
    pieces = [b"z"] * MAX_IDLE_BYTES
    _, found = fed(*cut(HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunked(pieces), range(0, 600_000, 5000)))
    assert found == b"".join(pieces)


def num_replies() -> int:
    # Not isinstance: that asks objects of other packages what they are, and some answer with a warning.
    return sum(type(found) is Reply for found in gc.get_objects())


@pytest.mark.parametrize("is_whole", [True, False])
def test_nothing_is_left_for_the_garbage_collector(is_whole):
    gc.collect()
    gc.disable()
    num_before = num_replies()
    try:
        reply, _ = fed(HEAD + b"Content-Length: 2\r\n\r\no" + b"k" * is_whole)
        if not is_whole:
            reply.end()
        del reply
        assert num_replies() == num_before
    finally:
        gc.enable()
