"""Log lines for machines, and one per request with the client's id."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from pathlib import Path

import pytest

from kvferry.cli import console
from kvferry.cli.server.logs import ACCESS, INSTANCES, SAID, JsonLines, LogFormat, log_to_stderr
from kvferry.errors import ConfigurationError
from kvferry.http.request_ids import is_usable
from kvferry.router.fleet.instance_pool import InstancePool

sys.path.insert(0, str(Path(__file__).parents[1] / "router"))
from router_harness import cluster, decode_engine, failing, prefill_engine


@pytest.fixture(autouse=True)
def everything_as_it_was():
    """Other tests of this process log as well, and expect levels that nobody has set."""
    root = logging.getLogger()
    levels = {logger: logger.level for logger in (root, *map(logging.getLogger, (ACCESS, INSTANCES, SAID)))}
    handlers, on_signal = root.handlers[:], signal.getsignal(signal.SIGUSR1)
    yield
    console.redirect_messages()
    root.handlers[:] = handlers
    for logger, level in levels.items():
        logger.setLevel(level)
    signal.signal(signal.SIGUSR1, on_signal)


def line(**more) -> dict:
    record = logging.LogRecord("a.b", logging.WARNING, "file", 1, "it %s", ("broke",), None)
    vars(record).update(more)
    return json.loads(JsonLines().format(record))


def test_sigusr1_says_what_all_threads_do_and_changes_nothing(capfd):
    log_to_stderr()
    os.kill(os.getpid(), signal.SIGUSR1)
    told = capfd.readouterr().err
    assert "Thread 0x" in told or "Current thread 0x" in told
    assert __file__ in told


def test_what_a_library_writes_itself_is_not_there_twice():
    library = logging.getLogger("huggingface_hub")
    library.addHandler(logging.StreamHandler())
    log_to_stderr()
    assert library.handlers == []
    assert library.propagate


def test_a_line_is_one_object():
    found = line()
    assert (found["level"], found["logger"], found["message"]) == ("warning", "a.b", "it broke")
    assert found["time"].endswith("+00:00")
    assert line(request_id="r")["request_id"] == "r"
    assert line(fields={"status": 200})["status"] == 200


def test_a_traceback_stays_on_its_line():
    try:
        raise ValueError("why")
    except ValueError:
        found = line(exc_info=sys.exc_info())
    assert "ValueError: why" in found["error"]


@pytest.mark.parametrize("format_", LogFormat)
def test_the_format_is_chosen(format_, capsys):
    root = logging.getLogger()
    root.handlers.clear()
    log_to_stderr(format_, True)
    (handler,) = root.handlers
    assert isinstance(handler.formatter, JsonLines) == (format_ is LogFormat.JSON)
    assert logging.getLogger(ACCESS).level == logging.INFO
    assert logging.getLogger(INSTANCES).isEnabledFor(logging.INFO)
    console.say("routing")
    err = capsys.readouterr().err
    console.print_error(ConfigurationError("no", found="this", hint="do that"))
    told = capsys.readouterr().err
    assert "hint:     do that" in told if format_ is LogFormat.PLAIN else "do that" in json.loads(told)["message"]
    assert err == "routing\n" if format_ is LogFormat.PLAIN else json.loads(err)["message"] == "routing"


@pytest.mark.parametrize(
    ("body", "headers", "status", "code"),
    [
        (b"{bad", {"x-request-id": "from-the-client"}, 400, "invalid_request"),
        (b"{}", {"x-request-id": "no id"}, 400, "invalid_request"),
    ],
)
async def test_a_request_that_is_refused_is_a_line_too(body, headers, status, code, caplog):
    caplog.set_level(logging.INFO, "kvferry.router.access")
    async with (
        cluster([], [decode_engine()]) as c,
        c.session.post(c.url + "/v1/completions", data=body, headers=headers) as response,
    ):
        assert response.status == status
    (record,) = [record for record in caplog.records if record.name == "kvferry.router.access"]
    fields = vars(record)["fields"]
    # An id that no engine could be shown is not written into a log either.
    sent = headers["x-request-id"]
    assert fields["request_id"] == sent if is_usable(sent) else len(fields["request_id"]) == 32
    assert (fields["endpoint"], fields["status"], fields["reason"]) == ("/v1/completions", status, code)


ASKED = {"prompt": "x"}


async def test_a_request_that_meets_a_defect_is_one_line_with_its_id(caplog, monkeypatch):
    monkeypatch.setattr(InstancePool, "reserve", lambda *_: 1 / 0)
    caplog.set_level(logging.INFO, "kvferry.router.access")
    async with cluster([], [decode_engine()]) as c:
        assert (await c.complete(headers={"x-request-id": "mine"})).status == 500
    (record,) = [record for record in caplog.records if record.name == "kvferry.router.access"]
    assert (vars(record)["fields"]["request_id"], vars(record)["fields"]["status"]) == ("mine", 500)


async def test_each_request_is_a_line_with_the_clients_id(caplog):
    caplog.set_level(logging.INFO, "kvferry.router.access")
    async with cluster([prefill_engine("p0", failing(500, "no"))], [decode_engine()]) as c:
        await c.complete(headers={"x-request-id": "from-the-client"})
    (record,) = [record for record in caplog.records if record.name == "kvferry.router.access"]
    fields = vars(record)["fields"]
    assert (fields["request_id"], fields["status"], fields["decode"]) == ("from-the-client", 200, c.decode[0].url)
    assert (fields["path"], fields["reason"]) == ("decode-only", "prefill_failed")
    assert set(fields["phases_s"]) == {"queue", "prefill", "first_decode"}
    (trouble,) = [record for record in caplog.records if record.name == "kvferry.router.flow.dispatcher"]
    assert vars(trouble)["request_id"] == "from-the-client"
