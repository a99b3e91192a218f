"""What goes wrong between the router and an engine: labels for counters, words for clients."""

from __future__ import annotations

import errno

import aiohttp

from kvferry.errors import PeerError
from kvferry.router.events import INSTANCE_DOWN, NOT_WANTED, PREFILL_GONE, PREFILL_LOST, PREFILL_REFUSED, TOO_LATE

REFUSED, UNREACHABLE, CONNECT_TIMEOUT = "refused", "unreachable", "connect_timeout"
RESET, MALFORMED = "reset", "malformed"
DEADLINE, STALL = "deadline", "stall"
EXHAUSTED = "exhausted"

# The reasons that say that nobody is there. A connection that breaks may be the end of one request alone.
GONE = frozenset((REFUSED, UNREACHABLE, CONNECT_TIMEOUT))

# What a system says of hosts that do not answer it. Where a host answers and nobody listens, it refuses.
SILENT = frozenset((errno.EHOSTUNREACH, errno.EHOSTDOWN, errno.ENETUNREACH, errno.ENETDOWN, errno.ETIMEDOUT))

# What the system says when this process can have no more descriptors or ports, which is no instance's fault.
OUT_OF = frozenset((errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.ENOBUFS, errno.ENOMEM))

# What a client is told. The error itself names hosts and ports of the inside, so it goes to the log.
MESSAGES = {
    REFUSED: "the engine cannot be reached",
    UNREACHABLE: "the engine's host cannot be reached",
    CONNECT_TIMEOUT: "the engine did not accept the connection in time",
    RESET: "the engine's connection broke",
    MALFORMED: "the engine does not speak the protocol",
    DEADLINE: "the engine took too long",
    STALL: "the engine sent nothing for too long",
    EXHAUSTED: "the router can open no more connections",
    INSTANCE_DOWN: "the engine does not answer any more",
    PREFILL_LOST: "the prompt was not computed",
    PREFILL_GONE: "the prefill instance cannot be reached",
    PREFILL_REFUSED: "the prefill instance refused the request",
    NOT_WANTED: "nobody waits for it any more",
    TOO_LATE: "the request's own time limit is over",
}

# Everything that a request to an engine can raise.
FAILURES = (aiohttp.ClientError, OSError, PeerError)


def reason_of(error: BaseException, timeout_reason: str) -> str:
    """The label of a failure; `timeout_reason` is the one of a time limit that was the caller's own."""
    match error:
        case OSError(errno=number) if number in OUT_OF:
            return EXHAUSTED
        case aiohttp.ServerTimeoutError():
            return CONNECT_TIMEOUT
        case aiohttp.ClientConnectorError():
            return UNREACHABLE if error.errno in SILENT else REFUSED
        case ConnectionRefusedError():
            return REFUSED
        case TimeoutError():
            return timeout_reason
        case aiohttp.ClientConnectionError() | aiohttp.ClientPayloadError() | OSError():
            return RESET
        case _:
            return MALFORMED
