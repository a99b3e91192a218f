"""The secret that all engines of a deployment share: only a process that knows it is a peer.

It comes from a file, never from a command line, and is never printed. Both key pairs of the control channel follow
from it, so that operators handle one file and no keys.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import stat
from dataclasses import dataclass, field
from typing import Final

from kvferry.errors import ConfigurationError

MIN_TOKEN_BYTES = 32
MAX_TOKEN_BYTES = 4096
# A typed secret repeats its characters; 32 random hexadecimal digits practically never have fewer different ones.
MIN_DIFFERENT_BYTES = 8
MAKE_ONE = "make one with: (umask 077; openssl rand -hex 32 > kvferry.token)"
READABLE_BY_OTHERS = stat.S_IROTH | stat.S_IWOTH | stat.S_IWGRP


@dataclass(frozen=True, slots=True)
class SharedToken:
    """Empty when there is none. Raises ConfigurationError for one that could be guessed."""

    secret: bytes = field(default=b"", repr=False)

    def __post_init__(self) -> None:
        if not self.secret:
            return
        is_long = MIN_TOKEN_BYTES <= len(self.secret) <= MAX_TOKEN_BYTES
        if not is_long or len(set(self.secret)) < MIN_DIFFERENT_BYTES:
            raise ConfigurationError(
                "the shared token could be guessed",
                found=f"{len(self.secret)} bytes, {len(set(self.secret))} of them different",
                expected=f"{MIN_TOKEN_BYTES} to {MAX_TOKEN_BYTES} random bytes",
                hint=MAKE_ONE,
            )

    def __bool__(self) -> bool:
        return bool(self.secret)

    def derived(self, purpose: bytes) -> bytes:
        """32 bytes that only holders of the token can compute, others for every purpose."""
        return hmac.digest(self.secret, b"kvferry 1 " + purpose, hashlib.sha256)


NO_TOKEN: Final = SharedToken()


def read_token(path: str) -> SharedToken:
    """The token in a file, white space around it apart; `NO_TOKEN` for an empty path.

    Raises ConfigurationError when it cannot be read, when others may read or change it, or when it could be guessed.
    """
    if not path:
        return NO_TOKEN
    try:
        secret = _contents(path)
    except OSError as error:
        raise ConfigurationError(
            "the token file cannot be read", found=f"{path}: {error.strerror}", hint=MAKE_ONE
        ) from error
    if not secret:
        raise ConfigurationError("the token file is empty", found=path, hint=MAKE_ONE)
    return SharedToken(secret)


def _contents(path: str) -> bytes:
    # Not blocking: a pipe in the place of the file would be waited for.
    with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise ConfigurationError("the token file is not a regular file", found=path, hint=MAKE_ONE)
        if status.st_mode & READABLE_BY_OTHERS:
            raise ConfigurationError(
                "other users can read or change the token file",
                found=f"{path} with mode {stat.S_IMODE(status.st_mode):04o}",
                expected="mode 0600 or 0400; 0640 or 0440 where a group must read it",
                hint=f"chmod 600 {path}; in Kubernetes, set the secret volume's defaultMode",
            )
        # One more than is allowed, so that a longer one is seen to be too long.
        return file.read(MAX_TOKEN_BYTES + 2).strip()
