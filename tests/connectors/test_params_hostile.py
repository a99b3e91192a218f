"""`kv_transfer_params` come back from a client: whatever is in them is a place to ask at, or a typed error."""

import ipaddress
import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvferry.errors import RequestError, TransferError
from kvferry.kv_transfer_params import MAX_RANKS, MAX_ROOM, Reach, RemoteCache, from_params, room_of, to_params
from kvferry.wire.codec import decode, encode
from kvferry.wire.messages import Claim, Party, Reference

REFERENCE = Reference("p0", "e1", "r1", "l1")
ADDRESS = "tcp://127.0.0.1:5600"
GOOD = to_params(REFERENCE, [ADDRESS], [[3, 5]], 7)
OURS = GOOD["kvferry"]

# With half characters, which Python's own JSON reader lets through.
TEXT = st.text(st.characters(exclude_categories=[]), max_size=300)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
REACHES = st.sampled_from(Reach)


def checked(error: TransferError) -> TransferError:
    assert error.reason == "malformed"
    str(error).encode()
    return error


def answer(params: object, reach: Reach = Reach.THIS_HOST) -> RemoteCache | TransferError:
    """What comes of parameters; a remote can always travel, and an error can always be answered and logged."""
    try:
        remote = from_params(params, reach)
    except TransferError as error:
        return checked(error)
    claim = Claim(Party("d0", "e2", 0), "q1", remote.reference, 7, (0,))
    assert decode(encode(claim)) == claim
    assert 1 <= len(set(remote.addresses)) == len(remote.addresses) <= MAX_RANKS
    return remote


@given(JSON, REACHES)
def test_any_value_is_a_remote_or_a_typed_error(params, reach):
    answer(params, reach)


@given(st.sampled_from(sorted(GOOD)), JSON, REACHES)
@example("remote_request_id", "\ud800", Reach.THIS_HOST)
@example("remote_engine_id", "p\udfff", Reach.ANY_HOST)
@settings(max_examples=300)
def test_any_value_at_any_key_is_a_remote_or_a_typed_error(key, value, reach):
    answer(GOOD | {key: value}, reach)


@given(st.sampled_from(sorted(OURS)), JSON, REACHES)
@example("lease_id", "\ud800", Reach.THIS_HOST)
@settings(max_examples=300)
def test_any_value_at_any_key_of_ours_is_a_remote_or_a_typed_error(key, value, reach):
    answer(GOOD | {"kvferry": OURS | {key: value}}, reach)


@given(st.dictionaries(st.sampled_from(sorted(GOOD)) | TEXT, JSON, max_size=8), REACHES)
def test_any_keys_are_a_remote_or_a_typed_error(params, reach):
    answer(params, reach)


HOSTS = st.ip_addresses().map(lambda ip: f"[{ip}]" if ip.version == 6 else str(ip)) | st.sampled_from(
    [
        "localhost",
        "example.org",
        "127.1",
        "2130706433",
        "0x7f.0.0.1",
        "127.0.0.1.",
        "[::ffff:127.0.0.1]",
        "[::1%1]",
        "*",
    ]
)
PORTS = st.integers(-1, 70_000).map(str) | st.sampled_from(["", "0080", "http", "80 ", "\u0661", "80/x"])
SCHEMES = st.sampled_from(["tcp://", "ipc://", "inproc://", "TCP://", "", "tcp://user@", "http://", "tcp:"])


@given(SCHEMES, HOSTS, PORTS)
@settings(max_examples=500)
def test_without_a_token_an_engine_goes_nowhere_but_to_this_host(scheme, host, port):
    found = answer(GOOD | {"kvferry": OURS | {"addresses": [f"{scheme}{host}:{port}"]}})
    if isinstance(found, RemoteCache):
        assert scheme == "tcp://"
        assert ipaddress.ip_address(host.strip("[]")).is_loopback
        assert 1 <= int(port) <= 65_535


@given(SCHEMES, HOSTS, PORTS)
@settings(max_examples=500)
def test_with_a_token_an_engine_goes_to_numbers_only(scheme, host, port):
    """A name would be looked up: by a server of the client's choice, while every other request waits."""
    found = answer(GOOD | {"kvferry": OURS | {"addresses": [f"{scheme}{host}:{port}"]}}, Reach.ANY_HOST)
    if isinstance(found, RemoteCache):
        address = ipaddress.ip_address(host.strip("[]"))
        assert not address.is_unspecified
        assert not address.is_multicast


@pytest.mark.parametrize("address", ["tcp://10.0.0.1:80", "tcp://[fd00::1]:5600", "tcp://192.168.1.2:65535"])
def test_other_hosts_need_a_token(address):
    params = GOOD | {"kvferry": OURS | {"addresses": [address]}}
    assert isinstance(answer(params), TransferError)
    assert answer(params, Reach.ANY_HOST).addresses == (address,)


def test_one_place_under_two_names_is_one_place():
    addresses = ["tcp://[::1]:80", "tcp://[0:0:0:0:0:0:0:1]:80"]
    assert "more than once" in str(answer(GOOD | {"kvferry": OURS | {"addresses": addresses}}))


def test_size_does_not_matter():
    huge = GOOD | {
        "remote_block_ids": [[0] * 100_000],
        "more": "x" * 1_000_000,
        "kvferry": OURS | {"more": [{}] * 1000},
    }
    assert isinstance(answer(json.loads(json.dumps(huge))), RemoteCache)
    assert len(str(answer(GOOD | {"kvferry": OURS | {"epoch": "x" * 1_000_000}}))) < 5000


@given(JSON, TEXT)
@example("\ud800", "room")
@example(5, "\ud800")
def test_any_room_of_a_prefill_is_a_number_or_a_typed_error(value, key):
    try:
        room = room_of({"do_remote_decode": True, "kvferry": {"room": value, key: value}})
    except RequestError as error:
        str(error).encode()
    else:
        assert 1 <= room <= MAX_ROOM
