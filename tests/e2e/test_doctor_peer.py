"""`kvferry doctor --peer` against an engine that `kvferry serve` has started, with a shared token and without it."""

import json
import os
import secrets
import subprocess
import sys

import pytest

from kvferry.agent.control.shared_token import NO_TOKEN
from kvferry.cli.doctor.peer import try_peer
from kvferry.errors import TransportError

DEADLINE_S = 60.0
KVFERRY = (sys.executable, "-m", "kvferry.cli.main")


@pytest.fixture
def token(tmp_path):
    path = tmp_path / "kvferry.token"
    path.touch(mode=0o600)
    path.write_text(secrets.token_hex(32))
    return str(path)


@pytest.fixture
def address(tiny_model, token):
    """Where the engine's transfers are; it ends when its standard input does."""
    command = (
        *KVFERRY,
        "serve",
        "--model",
        str(tiny_model),
        "--port",
        "0",
        "--token-file",
        token,
        "--json",
        "--as-child",
    )
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True) as engine:
        yield json.loads(engine.stdout.readline())["transfer_address"]
        engine.stdin.close()
        engine.wait(DEADLINE_S)


def doctor(*arguments, **settings):
    command = (*KVFERRY, "doctor", "--json", *arguments)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("UCX_")} | settings
    done = subprocess.run(command, capture_output=True, text=True, timeout=3 * DEADLINE_S, env=environment, check=False)
    return done.returncode, json.loads(done.stdout)


def test_a_running_engine_is_tested_over_every_transport(address, token):
    _, report = doctor("--peer", address.removeprefix("tcp://"), "--token-file", token)
    peer = report["trials"]["peer"]
    assert (peer["place"], peer["chosen"] in {"shm", "cma"}) == ("same host", True)
    rows = {row["transport"]: row for row in peer["transports"]}
    for name in ("shm", "cma", "tcp"):
        assert rows[name]["error"] == ""
        assert rows[name]["read"]["gigabytes_per_s"] > 0
        assert rows[name]["write"]["gigabytes_per_s"] > 0

    # A fallback of nixl to tcp is seen at the peer, too, though auto does better: so it is only a note there.
    _, report = doctor("--peer", address, "--token-file", token, UCX_TLS="tcp")
    rows = {row["transport"]: row for row in report["trials"]["peer"]["transports"]}
    if not rows["nixl"]["error"]:
        assert {carrier.split("/")[0] for carrier in rows["nixl"]["carriers"]} == {"tcp"}
        assert any(
            finding["severity"] == "note" and "slower transport" in finding["what"] for finding in report["findings"]
        )

    with pytest.raises(TransportError, match=r"has ended the handshake.*--token-file"):
        try_peer(address, NO_TOKEN, lambda text: None)
