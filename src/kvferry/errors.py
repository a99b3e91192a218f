"""Every error that a user or a peer can cause: what is wrong, what was found, what was expected, what to do.

The tree has one root, `FerryError`. A branch is a place where callers differ in what they do about it: a
`ConfigurationError` ends a command, a `RequestError` ends one request, a `PeerError` ends one peer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

Value = TypeVar("Value")

MAX_TEXT = 2048


def _cut(text: str) -> str:
    """The start of a text that users or peers may send: nobody reads more, and no refusal on the wire holds more."""
    return text if len(text) <= MAX_TEXT else text[: MAX_TEXT - 1] + "\N{HORIZONTAL ELLIPSIS}"


class FerryError(Exception):
    """Root of all errors of this package.

    `found`, `expected` and `hint` are empty strings when they do not apply; none is longer than `MAX_TEXT`.
    """

    def __init__(self, what: str, *, found: str = "", expected: str = "", hint: str = "") -> None:
        self.what, self.found, self.expected, self.hint = (_cut(text) for text in (what, found, expected, hint))
        super().__init__(str(self))

    def __str__(self) -> str:
        parts = [self.what]
        if self.found:
            parts.append(f"found: {self.found}")
        if self.expected:
            parts.append(f"expected: {self.expected}")
        if self.hint:
            parts.append(f"hint: {self.hint}")
        return "; ".join(parts)


class ConfigurationError(FerryError):
    """What the user asked for cannot be set up."""


def choice_named(what: str, name: str, known: Mapping[str, Value]) -> Value:
    """The choice that users call `name`; `what` says what is chosen. Raises ConfigurationError, with all names."""
    if name not in known:
        raise ConfigurationError(f"unknown {what}", found=name, expected=" or ".join(known))
    return known[name]


class LayoutError(FerryError):
    """A description of a cache contradicts itself or leaves its region."""


MAX_LISTED = 20


class IncompatibleError(FerryError):
    """Two descriptions do not describe the same cache; `differences` lists every one of them."""

    def __init__(self, differences: tuple[str, ...]) -> None:
        self.differences = differences
        more = [f"and {len(differences) - MAX_LISTED} more"] if len(differences) > MAX_LISTED else []
        super().__init__(
            "the two engines do not hold the same cache",
            found="; ".join([*differences[:MAX_LISTED], *more]),
            expected="equal states, axes, extents, element sizes and dtypes on both sides",
            hint="serve the same model with the same cache dtype and the same speculator on both engines",
        )


class UncoveredError(FerryError):
    """No source rank holds a part of what a target rank needs."""


class RequestError(FerryError):
    """One request cannot be served; the engine and the peers are fine. `param` is the field of the request that is at
    fault, as OpenAI's errors name it; empty where it is none, or not known."""

    def __init__(self, what: str, *, found: str = "", expected: str = "", hint: str = "", param: str = "") -> None:
        self.param = _cut(param)
        super().__init__(what, found=found, expected=expected, hint=hint)


class BlockTableError(RequestError):
    """Block ids or a token range that do not fit the layout."""


class TooManyRowsError(RequestError):
    """A request would move in so many small rows that listing them would take all memory."""


class PromptTooLongError(RequestError):
    """The prompt and its answer do not fit the engine's cache."""


class TransferError(RequestError):
    """The cache of one request did not arrive; `reason` is a short stable label for counters."""

    def __init__(self, reason: str, what: str, *, found: str = "", expected: str = "", hint: str = "") -> None:
        self.reason = reason
        super().__init__(what, found=found, expected=expected, hint=hint)


class PeerError(FerryError):
    """Something is wrong with one peer."""


class WireError(PeerError):
    """A frame that cannot be decoded; it is counted and answered with a refusal."""


class WireVersionError(WireError):
    """A frame of another wire version than ours."""


class TransportError(PeerError):
    """A transport cannot be set up or cannot reach a peer."""


class IllegalEventError(FerryError):
    """A session was given an event that its state does not allow: a defect of ours, with its history."""
