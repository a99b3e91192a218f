"""Rooms in which two engines meet, and the fields by which each of them is told of one, in its own words: pure."""

from __future__ import annotations

from urllib.parse import urlsplit

import msgspec

from kvferry.kv_transfer_params import room_params
from kvferry.router.events import Room
from kvferry.router.fleet.engine_info import EngineInfo, Handover, handover_between
from kvferry.router.policy.records import Instance


def room_between(prefill: Instance, info: EngineInfo, decode: EngineInfo, number: int) -> Room | None:
    """The room of this number at a prefill instance, by what the two say of themselves; None if a reference travels."""
    if handover_between(info, decode) is not Handover.ROOM:
        return None
    host, port = info.bootstrap_host or urlsplit(prefill.url).hostname or "", info.bootstrap_port
    place = {"bootstrap_host": host, "bootstrap_port": port, "bootstrap_room": number}
    # Without the client's `rid`: SGLang refuses one that it still knows, as it may after a try that failed. And without
    # its choice among the engines of a prefill server, which is the room's.
    of_sglang = _json(place | {"rid": None, "disagg_prefill_dp_rank": None})
    cache = room_params(number, host, port)
    for_decode = of_sglang if decode.handover is Handover.ROOM else _json({"kv_transfer_params": cache})
    if info.handover is Handover.ROOM:
        return Room(of_sglang, for_decode)
    asked = {"do_remote_decode": True, "kvferry": {"room": number}}
    return Room(_json({"kv_transfer_params": asked}), for_decode, kept=_json(cache))


_json = msgspec.json.encode
