import contextlib
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.errors import WireError
from kvferry.plan.description.describe import EngineShape, describe
from kvferry.plan.description.model import attention
from kvferry.plan.description.prompt import Prompt
from kvferry.plan.description.span import Span
from kvferry.plan.description.tokens import TokenRange, TokenSet
from kvferry.plan.digests.subject import DigestPolicy, Part, Subject
from kvferry.plan.programs.copies import Direction
from kvferry.wire import messages as m
from kvferry.wire.codec import MAX_FRAME_BYTES, decode, encode, frame_of

VERSION = bytes([m.WIRE_VERSION])
PARTY = m.Party("prefill-0", "e1", 0)
LAYOUT = describe(attention(2, 2, 4, "float32", 4), EngineShape(1, 1, 4, 8, "token-major"), 1 << 20)[0]
PART = Part(("s", "t"), (Span(0, 2), Span(1, 4)), TokenSet(4, (Span(0, 2),)), TokenRange(3, 9))
FAR = replace(LAYOUT, regions=tuple(replace(one, address=one.address + 2**64 - (1 << 30)) for one in LAYOUT.regions))
SUBJECT = Subject(DigestPolicy.SAMPLED, 11, (PART, PART))
EXAMPLES = [
    m.Hello(1, "0.1.0", PARTY, "decode-0", "e2"),
    m.Welcome(1, "0.1.0", PARTY, 1, "abc"),
    m.OfferRequest(PARTY),
    m.Offer(PARTY, LAYOUT, (m.TransportOffer("shm", b"\x00\xff", ""),), m.Probe(4096, 64, 7)),
    m.Offer(PARTY, FAR, (m.TransportOffer("nixl", b"\x00\xff", ""),), m.Probe(4096, 64, 7)),
    m.Claim(PARTY, "c", m.Reference("prefill-0", "e1", "r", "l"), 12, (0,)),
    m.Claim(
        PARTY,
        "c",
        m.Reference("prefill-0", "e1", "r", "l"),
        12,
        (0,),
        Direction.WRITE,
        ((1, -1),),
        (TokenRange(0, 12),),
    ),
    m.TargetOffer(PARTY, (LAYOUT,), (m.TransportOffer("shm", b"", "no"),), m.Probe(4096, 64, 7)),
    m.Reached("shm", "shm 9 GB/s"),
    m.Claim(PARTY, "c", m.Reference("p", "e", "r", "l"), 12, (0,), subject=SUBJECT, prompt=Prompt.of([7]).name("l")),
    m.Grant("c", ((1, 2, 3),)),
    m.Pack(PARTY, "c", "l", 0, 3, 2**64 - 1),
    m.Written("c", 1024, 3),
    m.Landed(PARTY, "c", "l"),
    m.Valid("c"),
    m.Valid("c", (b"12345678", b"abcdefgh")),
    m.Renew(PARTY, ("l",), b"padding"),
    m.Renewed(("l",), b"padding"),
    m.Abort(PARTY, "c", "l"),
    m.Aborted("c", "e"),
    m.Refusal(m.Reason.EXPIRED, "what", "found", "expected", "c"),
]


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: type(message).__name__)
def test_every_message_survives_the_wire(message):
    assert decode(encode(message)) == message


@pytest.mark.parametrize(
    ("frame", "says"),
    [
        (b"", "not a frame"),
        (b"GET / HTTP/1.1", "not a frame"),
        (b"KF\xff\x80", "version 255"),
        (b"KF" + VERSION + b"\x80", "damaged"),
        (frame_of(b"\x80"), "malformed"),
        (frame_of(msgspec.msgpack.encode({"type": "valid", "claim_id": 3})), "malformed"),
        (frame_of(msgspec.msgpack.encode({"type": "valid", "claim_id": "c", "more": 1})), "malformed"),
        (frame_of(msgspec.msgpack.encode({"type": "delete"})), "malformed"),
        (frame_of(b"\x91" * 100_000), "malformed"),
        (b"KF" + VERSION + b"\x00" * MAX_FRAME_BYTES, "too large"),
    ],
)
def test_a_bad_frame_is_refused_with_the_reason(frame, says):
    with pytest.raises(WireError, match=says):
        decode(frame)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        (b"sampled", b"guessed"),
        (b"\xa6period\x04", b"\xa6period\x01"),
        (b"\xa5first\x03", b"\xa5first\x0f"),
        (b"\xa5first\x03", b"\xa5first\xff"),
        (b"\xa4seed\x0b", b"\xa4seed\xf9"),
        (b"\x92\xa1s\xa1t", b"\x90"),
        (b"12345678", b""),
    ],
)
def test_a_digest_that_makes_no_sense_is_refused_on_arrival(right, wrong):
    bodies = [msgspec.msgpack.encode(each) for each in EXAMPLES]
    (body,) = [body for body in bodies if right in body]
    with pytest.raises(WireError, match="malformed"):
        decode(frame_of(body.replace(right, wrong)))


def test_a_layout_that_leaves_its_region_is_refused_on_arrival():
    body = msgspec.msgpack.encode(EXAMPLES[3]).replace(msgspec.msgpack.encode(LAYOUT.regions[0].size_bytes), b"\x01")
    with pytest.raises(WireError, match="malformed"):
        decode(frame_of(body))


@given(st.sampled_from(EXAMPLES), st.data())
def test_a_damaged_frame_decodes_or_is_refused_and_never_crashes(message, data):
    body = bytearray(msgspec.msgpack.encode(message))
    for _ in range(data.draw(st.integers(1, 4))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(body)))
    with contextlib.suppress(WireError):
        decode(frame_of(bytes(body[:cut])))


@given(st.sampled_from(EXAMPLES), st.data())
def test_a_frame_with_a_flipped_bit_is_refused_whatever_it_would_say(message, data):
    frame = bytearray(encode(message))
    bit = data.draw(st.integers(0, len(frame) * 8 - 1))
    frame[bit // 8] ^= 1 << bit % 8
    with pytest.raises(WireError):
        decode(bytes(frame))
