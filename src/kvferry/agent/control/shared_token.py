"""The secret that all engines of a deployment share: only a process that knows it is a peer.

It comes from a file, never from a command line, and is never printed. Both key pairs of the control channel follow
from it, so that operators handle one file and no keys. A file may hold several tokens, one in each line, so that a
fleet can go from one to another while it serves: the first is used, and the others are accepted.
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
# More of them than a change needs are a mistake, such as a token that was wrapped.
MAX_TOKENS = 4
MAKE_ONE = "make one with: (umask 077; openssl rand -hex 32 > kvferry.token)"
LET_READ = "let this process's group read it: chmod 640, or in Kubernetes securityContext.fsGroup"
READABLE_BY_OTHERS = stat.S_IROTH | stat.S_IWOTH | stat.S_IWGRP


@dataclass(frozen=True, slots=True)
class SharedToken:
    """Empty when there is none. Peers that use one of the `accepted` secrets are met as well.

    Raises ConfigurationError for a secret that could be guessed, and for accepted ones without one that is used.
    """

    secret: bytes = field(default=b"", repr=False)
    accepted: tuple[bytes, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        if not (self.secret or self.accepted):
            return
        for number, secret in enumerate((self.secret, *self.accepted), 1):
            if not MIN_TOKEN_BYTES <= len(secret) <= MAX_TOKEN_BYTES or len(set(secret)) < MIN_DIFFERENT_BYTES:
                which = f" ({number} of {1 + len(self.accepted)})" if self.accepted else ""
                raise ConfigurationError(
                    f"the shared token{which} could be guessed",
                    found=f"{len(secret)} bytes, {len(set(secret))} of them different",
                    expected=f"{MIN_TOKEN_BYTES} to {MAX_TOKEN_BYTES} random bytes",
                    hint=MAKE_ONE,
                )

    def __bool__(self) -> bool:
        return bool(self.secret)

    @property
    def each(self) -> tuple[SharedToken, ...]:
        """The one that is used, then those that are accepted; each as a token of its own."""
        return tuple(SharedToken(secret) for secret in (self.secret, *self.accepted) if secret)

    def derived(self, purpose: bytes) -> bytes:
        """32 bytes that only holders of the token can compute, others for every purpose."""
        return hmac.digest(self.secret, b"kvferry 1 " + purpose, hashlib.sha256)


NO_TOKEN: Final = SharedToken()


def read_token(path: str) -> SharedToken:
    """The token in a file, white space around it apart, and those that are accepted, one in each line of text;
    `NO_TOKEN` for an empty path.

    Raises ConfigurationError when it cannot be read, when others may read or change it, when a token could be guessed,
    or when there are too many.
    """
    if not path:
        return NO_TOKEN
    try:
        contents = _contents(path)
    except OSError as error:
        hint = LET_READ if isinstance(error, PermissionError) else MAKE_ONE
        raise ConfigurationError(
            "the token file cannot be read", found=f"{path}: {error.strerror}", hint=hint
        ) from error
    if not contents:
        raise ConfigurationError("the token file is empty", found=path, hint=MAKE_ONE)
    lines = [line.strip() for line in contents.splitlines() if line.strip()]
    if not _is_text(contents):
        # A line break among random bytes is one of them, but a line of them is not text.
        if any(_is_text(line) and len(line) >= MIN_TOKEN_BYTES for line in lines):
            raise ConfigurationError(
                "the token file holds text and other bytes",
                found=path,
                expected="one token in each line of text, or one token of any bytes",
                hint="a token that is not text cannot be changed while a fleet serves",
            )
        lines = [contents]
    used, *accepted = lines
    if len(accepted) >= MAX_TOKENS:
        raise ConfigurationError(
            "the token file holds too many tokens",
            found=f"{1 + len(accepted)} lines in {path}",
            expected=f"at most {MAX_TOKENS}, one in each line",
            hint="the first is used and the others are accepted; write a long token into one line",
        )
    return SharedToken(used, tuple(accepted))


def _is_text(contents: bytes) -> bool:
    try:
        return all(char.isprintable() or char in "\t\r\n" for char in contents.decode())
    except UnicodeDecodeError:
        return False


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
        # More than is allowed, so that what is longer is seen to be too long.
        return file.read(MAX_TOKENS * (MAX_TOKEN_BYTES + 2)).strip()
