"""Logs on stderr: plain lines, or JSON."""

from __future__ import annotations

import faulthandler
import logging
import signal
from datetime import UTC, datetime
from enum import StrEnum

import msgspec

from kvferry.cli import console

ACCESS = "kvferry.router.access"
# Instances that come, go, fail and are back: rare, and without these lines a warning has no end.
INSTANCES = "kvferry.router.fleet.instance_pool"
SAID = "kvferry.cli"
# Libraries that write their lines to stderr themselves, and hand them on as well: they would be there twice.
TWICE = ("huggingface_hub",)
STDERR = 2


class LogFormat(StrEnum):
    """`plain` lines, or one JSON object per line."""

    PLAIN = "plain"
    JSON = "json"


def log_to_stderr(format_: LogFormat = LogFormat.PLAIN, access: bool = False) -> None:
    """Log warnings and errors; with `access` every request; as JSON also the messages of the command.

    SIGUSR1 prints the stacks of all threads, as soon as the main thread can run Python.
    """
    # Not `faulthandler.register`: without the interpreter's lock it reads stacks that change meanwhile, and may crash.
    signal.signal(signal.SIGUSR1, lambda number, frame: faulthandler.dump_traceback(STDERR))
    handler = logging.StreamHandler()
    plain = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    handler.setFormatter(JsonLines() if format_ is LogFormat.JSON else plain)
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    for name in TWICE:
        logging.getLogger(name).handlers.clear()
    logging.getLogger(INSTANCES).setLevel(logging.INFO)
    if access:
        logging.getLogger(ACCESS).setLevel(logging.INFO)
    if format_ is LogFormat.JSON:
        logging.getLogger(SAID).setLevel(logging.INFO)
        console.redirect_messages(logging.getLogger(SAID).info)


class JsonLines(logging.Formatter):
    """`time` (UTC), `level`, `logger`, `message`, and the record's own `request_id` and `fields` if it has them."""

    def format(self, record: logging.LogRecord) -> str:
        attributes = vars(record)
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        if "request_id" in attributes:
            line["request_id"] = attributes["request_id"]
        return msgspec.json.encode(line | attributes.get("fields", {})).decode()
