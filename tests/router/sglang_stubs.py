"""Servers that keep to SGLang's protocol: a prefill answers when its cache was read, a decode computes no prompt."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from dataclasses import dataclass, field

from aiohttp import web
from router_harness import Behaviour, Engine, Seen, answer, decoding, failing

BACKEND = {"host": "127.0.0.1", "wire_version": "8"}
"""What kvferry's transfer backend adds."""
MODELS = [{"id": "tiny", "owned_by": "sglang"}]
USAGE = {"prompt_tokens": 9, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 4}}
NO_ROOM = "Invalid request: Disaggregated request received without bootstrap room id."


def room_fields(host: str, port: int, number: int) -> dict[str, object]:
    """What our router tells SGLang of a room."""
    place = {"bootstrap_host": host, "bootstrap_port": port, "bootstrap_room": number}
    return {**place, "rid": None, "disagg_prefill_dp_rank": None}


@dataclass
class Meeting:
    """Of a prefill and a decode request."""

    computed: asyncio.Event = field(default_factory=asyncio.Event)
    read: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass
class Rooms:
    """What the transfer backends of all stubs share: `host`, `port` and `number` of a room name one meeting."""

    meetings: dict[tuple[str, int, int], Meeting] = field(default_factory=lambda: defaultdict(Meeting))

    def of(self, seen: Seen) -> Meeting | None:
        """None where a request names no room."""
        fields = (seen.body.get(name) for name in ("bootstrap_host", "bootstrap_port", "bootstrap_room"))
        host, port, number = fields
        return self.meetings[host, port, number] if isinstance(number, int) else None

    def named_to_another(self, seen: Seen, host: str = "", port: int = 0) -> Meeting | None:
        """The same of an engine other than SGLang, at its own address where it prefills."""
        params = seen.body.get("kv_transfer_params") or {}
        number = params.get("kvferry", {}).get("room")
        place = params.get("remote_host", host), params.get("remote_port", port)
        return self.meetings[*place, number] if isinstance(number, int) else None

    def prefilling(self) -> Behaviour:
        async def behave(request: web.Request, seen: Seen) -> web.StreamResponse:
            meeting = self.of(seen)
            if meeting is None:
                return await failing(400, NO_ROOM)(request, seen)
            meeting.computed.set()
            await meeting.read.wait()
            return web.json_response(answer("one", usage=USAGE))

        return behave

    def decoding(self) -> Behaviour:
        async def behave(request: web.Request, seen: Seen) -> web.StreamResponse:
            meeting = self.of(seen)
            if meeting is None:
                return await failing(400, NO_ROOM)(request, seen)
            await meeting.computed.wait()
            meeting.read.set()
            return await decoding(request, seen)

        return behave

    def prefilling_for_sglang(self, port: int) -> Behaviour:
        """It answers when the prompt is computed."""

        async def behave(request: web.Request, seen: Seen) -> web.StreamResponse:
            meeting = self.named_to_another(seen, "127.0.0.1", port)
            assert meeting is not None
            meeting.computed.set()
            return web.json_response(answer("one", usage=USAGE))

        return behave

    def decoding_after_sglang(self) -> Behaviour:
        """It computes what it is not given."""

        async def behave(request: web.Request, seen: Seen) -> web.StreamResponse:
            meeting = self.named_to_another(seen)
            if meeting is not None:
                await meeting.computed.wait()
                meeting.read.set()
            return await decoding(request, seen)

        return behave


def other_engine(behave: Behaviour, port: int) -> Engine:
    """A stub that says who it is as the embedded engine does."""
    place = {"meets_in_rooms": True, "bootstrap_host": "127.0.0.1", "bootstrap_port": port}
    info = {"engine": "kvferry", "wire_version": "8", "epoch": f"epoch-{port}", **place}
    return Engine("other", behave, info=info, ready_status=200)


def other_prefill(rooms: Rooms, behave: Behaviour | None = None, port: int = 9007) -> Engine:
    return other_engine(behave or rooms.prefilling_for_sglang(port), port)


def other_decode(rooms: Rooms, behave: Behaviour | None = None) -> Engine:
    return other_engine(behave or rooms.decoding_after_sglang(), 9107)


def sglang_engine(mode: str, behave: Behaviour, port: int = 8998, **told: object) -> Engine:
    """A stub that says who it is as SGLang 0.5.23 does."""
    server_info = {
        "version": "0.5.23",
        "disaggregation_mode": mode,
        "disaggregation_transfer_backend": "kvferry",
        "disaggregation_bootstrap_port": port,
        "internal_states": [{}],
        **told,
    }
    return Engine(mode, behave, models=MODELS, server_info=server_info, ready_status=200)


def sglang_prefill(rooms: Rooms, behave: Behaviour | None = None, **options) -> Engine:
    return sglang_engine("prefill", behave or rooms.prefilling(), **options)


def sglang_decode(rooms: Rooms, behave: Behaviour | None = None, **options) -> Engine:
    return sglang_engine("decode", behave or rooms.decoding(), **options)
