"""NIXL's Python package: where it is found, and the errors that it raises."""

from __future__ import annotations

import importlib
import logging
from typing import Any, Final, NamedTuple

from kvferry.errors import TransportError
from kvferry.extras import MissingExtraError, how_to_install
from kvferry.transport.ucx.environment import PACKAGES

_ERROR_NAMES: Final = (
    "nixlBackendError",
    "nixlCancelledError",
    "nixlInvalidParamError",
    "nixlMismatchError",
    "nixlNotAllowedError",
    "nixlNotFoundError",
    "nixlNotPostedError",
    "nixlNotSupportedError",
    "nixlRemoteDisconnectError",
    "nixlRepostActiveError",
    "nixlUnknownError",
)


class Nixl(NamedTuple):
    """NIXL's Python interface, and the types of its errors."""

    api: Any
    errors: tuple[type[Exception], ...]


def load_nixl() -> Nixl:
    """Load NIXL's Python interface.

    Raises MissingExtraError where no package has them, TransportError where one cannot be loaded.
    """
    reasons = []
    for package in PACKAGES:
        try:
            api = importlib.import_module(f"{package}._api")
            bindings = importlib.import_module(f"{package}._bindings")
        except ImportError as error:
            if error.name != package:
                reasons.append(str(error))
            continue
        # It prints its own progress to our standard output otherwise.
        logging.getLogger("nixl").setLevel(logging.WARNING)
        return Nixl(api, (RuntimeError, *(vars(bindings)[name] for name in _ERROR_NAMES)))
    if reasons:
        hint = f"install it again: {how_to_install('nixl')}"
        raise TransportError("NIXL is installed but cannot be loaded", found="; ".join(reasons), hint=hint)
    raise MissingExtraError(f"NIXL is not installed: {how_to_install('nixl')}")
