"""Asks an instance who it is: kvferry's engines at `/kvferry/info`, others by what they have."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from kvferry.router.fleet.compatibility import Facts
from kvferry.router.policy.records import Instance
from kvferry.router.upstream.http_client import HttpClient, UpstreamRequest

Told = TypeVar("Told")

INFO_PATH = "/kvferry/info"
MAX_BYTES = 1 << 20


class Info(msgspec.Struct):
    """What kvferry's engines tell."""

    engine: str = ""
    version: str = ""
    wire_version: str = ""
    epoch: str = ""
    models: tuple[str, ...] = ()
    cache: str = ""
    prefix_cache: bool = True
    early: bool = False


class Model(msgspec.Struct):
    id: str
    owned_by: str = ""


class Models(msgspec.Struct):
    data: list[Model]


class Version(msgspec.Struct):
    version: str = ""


async def ask_facts(http: HttpClient, instance: Instance) -> Facts:
    """Empty where it tells nothing that can be understood. Raises only `FAILURES`."""
    told = await _get(http, instance, INFO_PATH)
    if told:
        info = _understood(told, Info) or Info()
        named = (info.engine, info.version, info.wire_version, info.epoch)
        return Facts(*named, info.models, info.cache, info.prefix_cache, info.early)
    models = _understood(await _get(http, instance, "/v1/models"), Models) or Models([])
    version = _understood(await _get(http, instance, "/version"), Version) or Version()
    owners = sorted({model.owned_by for model in models.data})
    return Facts(" ".join(owners), version.version, "", "", tuple(model.id for model in models.data), "")


async def _get(http: HttpClient, instance: Instance, path: str) -> bytes:
    response = await http.send(UpstreamRequest("GET", instance.url, path, [], b""))
    try:
        return await response.whole(MAX_BYTES) if response.status == 200 else b""
    finally:
        response.close()


def _understood(body: bytes, kind: type[Told]) -> Told | None:
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, RecursionError):
        return None
