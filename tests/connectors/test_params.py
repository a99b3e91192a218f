import json

import pytest

from kvferry import RemoteEngine
from kvferry.errors import RequestError, TransferError
from kvferry.kv_transfer_params import Reach, from_params, room_names, room_of, room_params, to_params
from kvferry.wire.messages import Reference

REFERENCE = Reference("p0", "e1", "r1", "l1")
ADDRESS = "tcp://127.0.0.1:5600"


def params(**changes):
    return to_params(REFERENCE, [ADDRESS], [[3, 5]], 7) | changes


def test_params_survive_json_and_name_the_lease():
    remote = from_params(json.loads(json.dumps(params())))
    assert (remote.reference, remote.addresses) == (REFERENCE, (ADDRESS,))


def test_params_keep_the_keys_that_existing_proxies_know():
    expected = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": "p0",
        "remote_request_id": "r1",
        "remote_block_ids": [[3, 5]],
        "remote_host": "127.0.0.1",
        "remote_port": 5600,
        "remote_num_tokens": 7,
        "tp_size": 1,
    }
    assert {key: value for key, value in params().items() if key != "kvferry"} == expected
    assert to_params(REFERENCE, [ADDRESS], [[3], [5]], 7)["remote_block_ids"] == [[3], [5]]


OURS = {"epoch": "e1", "lease_id": "l1", "addresses": [ADDRESS]}


@pytest.mark.parametrize(
    "hostile",
    [
        None,
        [],
        "do_remote_prefill",
        {},
        params(remote_engine_id=7),
        params(remote_request_id="x" * 10_000),
        params(kvferry=None),
        params(kvferry=OURS | {"addresses": []}),
        params(kvferry=OURS | {"addresses": ["tcp://10.0.0.1:80"]}),
        params(kvferry=OURS | {"addresses": ["tcp://127.0.0.1:80@evil:1"]}),
        params(kvferry=OURS | {"addresses": ["ipc:///etc/passwd"]}),
        params(kvferry=OURS | {"addresses": [ADDRESS + "\n"]}),
        params(kvferry=OURS | {"addresses": ["tcp://127.0.0.1:0"]}),
        params(kvferry=OURS | {"addresses": ["tcp://127.0.0.1:65536"]}),
        params(kvferry=OURS | {"addresses": [ADDRESS, ADDRESS]}),
        params(kvferry=OURS | {"addresses": [f"tcp://127.0.0.1:{port}" for port in range(1000, 1065)]}),
        params(kvferry=OURS | {"lease_id": {"$ne": 1}}),
    ],
    ids=lambda value: str(value)[-60:],
)
def test_what_a_client_made_up_is_a_typed_error(hostile):
    with pytest.raises(TransferError, match="kv_transfer_params cannot be read") as caught:
        from_params(hostile)
    assert caught.value.reason == "malformed"


ROOM = (1 << 63) - 1


def test_a_room_is_known_by_where_its_engine_listens_until_that_is_found():
    remote = from_params(json.loads(json.dumps(room_params(ROOM, "127.0.0.1", 8998))))
    assert not remote.is_located
    assert remote.addresses == ("tcp://127.0.0.1:8998",)
    ranks = ("tcp://127.0.0.1:8998", "tcp://127.0.0.1:9001")
    found = remote.at(RemoteEngine("p0", "e1", ranks))
    assert found.is_located
    assert (found.reference, found.addresses) == (Reference("p0", "e1", *room_names(ROOM)), ranks)


def test_a_room_may_be_at_an_ipv6_address_of_another_host():
    remote = from_params(room_params(1, "fd00::5", 8998), Reach.ANY_HOST)
    assert remote.addresses == ("tcp://[fd00::5]:8998",)


@pytest.mark.parametrize(
    "hostile",
    [
        room_params(0, "127.0.0.1", 8998),
        room_params(1 << 63, "127.0.0.1", 8998),
        room_params(5, "10.0.0.5", 8998),
        room_params(5, "localhost", 8998),
        room_params(5, "127.0.0.1", 0),
        room_params(5, "127.0.0.1:80/", 8998),
        room_params(5, "127.0.0.1", 8998) | {"remote_port": "8998"},
        room_params(5, "127.0.0.1", 8998) | {"remote_host": None},
        *(room_params(5, "127.0.0.1", 8998) | {"kvferry": {"room": room}} for room in (None, True, "5", 5.5, [5])),
    ],
)
def test_a_room_that_nobody_can_be_asked_for_is_malformed(hostile):
    with pytest.raises(TransferError, match="cannot be read") as caught:
        from_params(hostile)
    assert caught.value.reason == "malformed"


@pytest.mark.parametrize(
    ("ours", "room"), [({"room": 1}, 1), ({"room": ROOM}, ROOM), ({}, None), (None, None), (5, None)]
)
def test_a_prefill_says_its_room(ours, room):
    assert room_of({"do_remote_decode": True, "kvferry": ours}) == room


@pytest.mark.parametrize("room", [-1, 1 << 63, "5", "\ud800", 5.5, None, True, [5]])
def test_a_prefill_in_no_room_that_there_is_is_refused(room):
    with pytest.raises(RequestError, match="room in kv_transfer_params is invalid") as caught:
        room_of({"do_remote_decode": True, "kvferry": {"room": room}})
    str(caught.value).encode()
