"""A client's request, with what the router has found out about it."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.router.policy.records import RequestCost
from kvferry.router.request.client_request import ClientRequest
from kvferry.router.request.headers import Headers


@dataclass(frozen=True, slots=True)
class Call:
    """`target` is path and query, `headers` are as they came.

    `started_s` and `deadline_s`, after which the client has no use for an answer, are monotonic time.
    """

    target: str
    headers: Headers
    request_id: str
    request: ClientRequest
    cost: RequestCost
    started_s: float
    deadline_s: float
