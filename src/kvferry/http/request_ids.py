"""The id of a request, `x-request-id`: which ids of clients are accepted, and which id a refusal has."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable

NAME = b"x-request-id"
# Engines put the id into comma- and colon-separated lists of their own, where a separator in it is taken for two
# ids and the lease of the first is never renewed.
REQUEST_ID = re.compile(r"[A-Za-z0-9._=/+-]{1,128}")


def is_usable(request_id: str) -> bool:
    return REQUEST_ID.fullmatch(request_id) is not None


def id_of_refusal(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """The id of a refusal and of its line in the log: the client's own id if it is usable, else a new one."""
    ids = [value.decode("latin-1") for name, value in headers if name.lower() == NAME]
    return ids[0] if len(ids) == 1 and is_usable(ids[0]) else uuid.uuid4().hex
