import json

import pytest

from kvferry.errors import TransferError
from kvferry.kv_transfer_params import from_params, to_params
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
        "remote_block_ids": [3, 5],
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
