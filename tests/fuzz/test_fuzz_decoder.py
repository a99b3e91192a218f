"""Whatever bytes come, the decoder answers with a message or with a WireError, soon and in little memory."""

import tracemalloc

import msgspec
import pytest
from frame_maker import FrameMaker
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.errors import WireError
from kvferry.plan.description.layout import fingerprint
from kvferry.wire import messages as m
from kvferry.wire.codec import MAX_REQUEST_BYTES, decode, encode, frame_of

FRAMES = 20_000
# What Python makes of the smallest values that msgpack can hold, one byte each: an empty tuple is 8 bytes in a list.
MAX_EXPANSION = 40


def answer(frame: bytes) -> m.Message | WireError:
    try:
        return decode(frame)
    except WireError as error:
        return error


@pytest.mark.parametrize("seed", range(4))
def test_every_frame_is_a_message_or_a_wire_error(seed):
    maker = FrameMaker(seed)
    answers = [answer(maker.frame()) for _ in range(FRAMES // 4)]
    found = {type(each) for each in answers}
    assert found >= set(m.Message.__args__) | {WireError}


@given(st.binary(max_size=2000))
@settings(max_examples=500)
def test_any_bytes_are_a_message_or_a_wire_error(data):
    answer(data)
    answer(frame_of(data))


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=20,
)
TAGS = st.sampled_from([kind.__struct_config__.tag for kind in m.Message.__args__])


@given(TAGS, st.data())
@settings(max_examples=300)
def test_any_values_in_any_message_are_a_message_or_a_wire_error(tag, data):
    (kind,) = (kind for kind in m.Message.__args__ if kind.__struct_config__.tag == tag)
    names = st.sampled_from(kind.__struct_fields__)
    value = {"type": tag} | data.draw(st.dictionaries(names, VALUES, max_size=6))
    answer(frame_of(msgspec.msgpack.encode(value)))


def test_what_decodes_encodes_to_what_decodes_to_the_same():
    maker = FrameMaker(11)
    messages = [found for _ in range(FRAMES // 4) if not isinstance(found := answer(maker.frame()), WireError)]
    assert len(messages) > FRAMES / 40
    for message in messages:
        assert decode(encode(message)) == message


def offer(**layout) -> bytes:
    empty = {"states": [], "regions": [], "groups": [], "placements": []}
    party = {"engine_id": "x", "epoch": "x", "rank": 0}
    probe = {"address": 0, "size_bytes": 0, "seed": 0}
    body = {"type": "offer", "party": party, "layout": empty | layout, "transports": [], "probe": probe}
    return frame_of(msgspec.msgpack.encode(body))


def state(name: str, num_axes: int = 0) -> dict:
    axes = [{"name": "", "extent": 1}] * num_axes
    return {"name": name, "dtype": "", "item_bytes": 1, "axes": axes, "per_token": False}


def placement(name: str, num_axes: int = 0) -> dict:
    where = {"state": name, "region": 0, "group": 0, "offset": 0, "block_stride": 0, "token_stride": 0}
    return where | {"spans": [{"start": 0, "stop": 1}] * num_axes, "strides": [0] * num_axes}


REGION = {"address": 0, "size_bytes": 1, "kind": "", "device": 0}
GROUP = {"block_tokens": 1, "num_blocks": 1, "ring_tokens": 0}
NAMES = [f"{number:x}" for number in range(19_000)]
LARGE = {
    "states": offer(states=[state(name) for name in NAMES]),
    "equal states": offer(states=[state("x")] * len(NAMES)),
    "regions": offer(regions=[REGION] * 26_000),
    "groups": offer(groups=[GROUP] * 25_000),
    "axes": offer(states=[state("x", 65_000)]),
    "placements": offer(
        states=[state(name) for name in NAMES[:6000]],
        regions=[REGION],
        groups=[GROUP],
        placements=[placement(name) for name in NAMES[:6000]],
    ),
    "spans": offer(states=[state("x", 29_000)], regions=[REGION], groups=[GROUP], placements=[placement("x", 29_000)]),
    "blocks": frame_of(msgspec.msgpack.encode(m.Grant("c", ((0,) * 1_000_000,)))),
    "tables": frame_of(msgspec.msgpack.encode(m.Grant("c", ((),) * 1_000_000))),
    "names": frame_of(msgspec.msgpack.encode(m.Renewed(("",) * 1_000_000))),
}


@pytest.mark.parametrize("frame", LARGE.values(), ids=LARGE)
def test_a_large_frame_costs_memory_in_proportion(frame):
    """Time too: the loops are those that allocate. Each of these frames takes some 50 ms."""
    assert 700_000 < len(frame) < 1.1 * MAX_REQUEST_BYTES
    tracemalloc.start()
    found = answer(frame)
    if isinstance(found, m.Offer):
        fingerprint(found.layout)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < MAX_EXPANSION * len(frame)


@pytest.mark.parametrize("start", [b"\xdb", b"\xc6", b"\xdd", b"\xdf", b"\xc9"])
def test_an_announced_length_is_not_believed(start):
    body = msgspec.msgpack.encode({"type": "grant", "claim_id": "c"})[:-2] + start + b"\xff\xff\xff\xff"
    tracemalloc.start()
    assert isinstance(answer(frame_of(body)), WireError)
    assert isinstance(answer(frame_of(start + b"\xff\xff\xff\xff")), WireError)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 1 << 20


@pytest.mark.parametrize("depth", [1 << 10, 1 << 14, 1 << 18])
@pytest.mark.parametrize("step", [b"\x91", b"\x81\xa1a", b"\xdd\x00\x00\x00\x01"])
def test_depth_is_refused(step, depth):
    assert isinstance(answer(frame_of(step * depth)), WireError)
    grant = b"\x83\xa4type\xa5grant\xa8claim_id\xa1c\xacblock_tables"
    assert isinstance(answer(frame_of(grant + step * depth)), WireError)
    # Where a record tolerates fields that it does not know, they are skipped: that may not recurse without end either.
    assert isinstance(answer(frame_of(b"\x82\xa4type\xa5hello\xa4more" + step * depth)), WireError)
