"""What an object of ours is made for. SGLang hands its constructors an address and a room, and neither the request nor
the queue that they belong to: `plugin` notes these around the calls."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from kvferry.errors import ConfigurationError, FerryError, RequestError

logger = logging.getLogger(__name__)

_queue: ContextVar[Any] = ContextVar("queue", default=None)
_request: ContextVar[Any] = ContextVar("request", default=None)


def queue_being_made() -> Any:
    """The queue whose manager is being made: it knows the pool and the buffers of first tokens. Raises
    ConfigurationError when SGLang has not said."""
    return _made(_queue)


def request_being_made() -> Any:
    """The request whose sender or receiver is being made. Raises ConfigurationError when SGLang has not said."""
    return _made(_request)


def note_queue(original: Callable[..., Any], queue: Any) -> Any:
    """Around `_init_kv_manager` of a queue."""
    token = _queue.set(queue)
    try:
        return original(queue)
    finally:
        _queue.reset(token)


def note_request(original: Callable[..., Any], queue: Any, request: Any, *args: Any, **more: Any) -> Any:
    """Around a queue's method that makes a sender or a receiver."""
    token = _request.set(request)
    try:
        return original(queue, request, *args, **more)
    finally:
        _request.reset(token)


def error_of(error: Exception) -> FerryError:
    """What ends a request whose sender or receiver cannot be made. An exception from there would end the server, so
    whatever it is becomes the request's own error."""
    if isinstance(error, FerryError):
        return error
    logger.error("kvferry cannot serve a request", exc_info=error)
    return RequestError("kvferry cannot serve this request", found=f"{type(error).__name__}: {error}")


def _made(variable: ContextVar[Any]) -> Any:
    found = variable.get()
    if found is None:
        what = f"SGLang makes its objects in another way than kvferry knows: no {variable.name} is known"
        raise ConfigurationError(what, hint="install an SGLang that this kvferry supports")
    return found
