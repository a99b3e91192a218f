"""One request on its way: the router's real state machine and its real record of outcomes, towards engines that are
modelled. What the router's dispatcher does with sockets, this does with events."""

from __future__ import annotations

from collections.abc import Generator
from functools import cache
from typing import Any

import simpy

from kvferry.router import commands
from kvferry.router.commands import Command, Counted, Pick, Send
from kvferry.router.events import Answered, Began, Ended, Event, Failed, Opened, Path, Picked
from kvferry.router.flow.outcomes import OutcomeRecorder
from kvferry.router.flow.reservations import Reservations
from kvferry.router.flow.state_machine import Flow
from kvferry.router.policy.records import RequestCost, Role
from kvferry.router.request.client_request import Endpoint, parse_request
from kvferry.router.request.request_kind import RequestKind, kind_of
from kvferry.router.upstream.failures import GONE, RESET
from kvferry.simulate.fleet.hardware import Hardware
from kvferry.simulate.load import Arrival
from kvferry.simulate.outcome import Outcome
from kvferry.simulate.routing.membership import Membership
from kvferry.simulate.routing.upstream import Upstream
from kvferry.simulate.settings import Setting

Process = Generator[simpy.Event, Any, Any]
REQUEST = parse_request(b'{"model": "simulated", "prompt": "simulated", "stream": true}', Endpoint.COMPLETIONS)


@cache
def _kind(num_bits: int) -> RequestKind:
    """The kind of a request. Only the lengths of prompts differ here, and count to a power of two."""
    return kind_of(REQUEST, RequestCost(prompt_tokens=(1 << num_bits) - 1))


class Conversation:
    """One request. Belongs to one environment."""

    def __init__(self, env: simpy.Environment, setting: Setting, hardware: Hardware, membership: Membership) -> None:
        self._env, self._setting, self._hardware, self._membership = env, setting, hardware, membership
        self._asked: dict[Role, Upstream] = {}
        self._asked_s, self._is_computed = 0.0, False

    def run(self, arrival: Arrival, outcome: Outcome) -> Process:
        """Serve a request from its arrival to its end, and record in `outcome` what became of it."""
        self._arrival, self._outcome = arrival, outcome
        self._flow = Flow(REQUEST, self._setting.routing.fallback)
        kind = _kind(arrival.cost.prompt_tokens.bit_length())
        self._outcomes = OutcomeRecorder(self._membership.pool, arrival.cost, kind, streams=True)
        self._reserved = Reservations(self._outcomes, arrival.cost, self._membership.reserve)
        event: Event | None = Began()
        while event is not None:
            event = yield from self._carry_out(self._flow.handle(event))
        self._reserved.release(*Role)
        for upstream in self._asked.values():
            upstream.let_go()
        self._outcomes.end()
        outcome.ended_s = float(self._env.now)

    def _carry_out(self, batch: list[Command]) -> Process:
        event: Event | None = None
        for command in batch:
            match command:
                case commands.Pick():
                    event = self._pick(command)
                case commands.Send():
                    event = yield from self._send(command)
                case commands.Relay():
                    event = yield from self._relay()
                case commands.Count():
                    self._count(command)
                case commands.Refuse() | commands.Forward() | commands.EndWithError() | commands.Cut():
                    self._outcome.failure = self._outcome.failure or "failed"
        return event

    def _pick(self, command: Pick) -> Event:
        found = self._reserved.pick(command)
        return Picked(found[0]) if isinstance(found, tuple) else found

    def _send(self, command: Send) -> Process:
        """Do what `Dispatcher.send` and `UpstreamRequest.ask` do."""
        role, is_divided = command.instance.role, self._flow.path is Path.DISAGGREGATED
        reservation = self._reserved[role]
        engine, pool = self._hardware.engines[command.instance], self._membership.pool
        if role is Role.PREFILL and role in self._asked:
            self._asked[role].let_go()
        upstream = self._asked[role] = Upstream(self._env, self._arrival, engine, reservation.progress)
        self._outcomes.sends(reservation, is_divided)
        self._asked_s = float(self._env.now)
        pool.open_requests.began(upstream)
        if not engine.serves:
            upstream.connect_in_vain(self._membership.config.connect_timeout_s)
        elif role is Role.PREFILL:
            upstream.compute()
        elif is_divided:
            upstream.fetch(self._asked[Role.PREFILL], self._hardware, self._setting)
        else:
            self._outcome.is_alone = True
            upstream.answer()
        event: Event = yield upstream.event
        self._hear(upstream, event)
        return event

    def _hear(self, upstream: Upstream, event: Event) -> None:
        now, role = float(self._env.now), upstream.instance.role
        if not isinstance(event, Opened):
            self._end(upstream, event)
        handover_s = now - self._asked_s if isinstance(event, Opened) and self._is_computed else 0.0
        self._outcomes.hears(event, upstream.headers, handover_s)
        if role is Role.PREFILL:
            self._is_computed = isinstance(event, Answered)
            self._reserved.release(Role.PREFILL)
        if isinstance(event, Opened):
            self._outcome.first_s, self._outcome.is_recomputed = now, bool(upstream.headers)

    def _relay(self) -> Process:
        """Wait for the rest of the answer."""
        upstream = self._asked[Role.DECODE]
        event: Event = yield upstream.event
        self._end(upstream, event)
        self._outcomes.hears(event, [], 0.0)
        if isinstance(event, Ended):
            self._outcome.last_s, self._outcome.num_slow = float(self._env.now), upstream.num_slow
        return event

    def _end(self, upstream: Upstream, event: Event) -> None:
        """End a request to an engine, of which nothing more is expected, and tell the pool of a failure."""
        pool = self._membership.pool
        pool.open_requests.ended(upstream)
        if isinstance(event, Failed) and event.reason in GONE:
            pool.mark_down(upstream.instance, event.reason)
        elif isinstance(event, Failed) and event.reason == RESET:
            pool.request_probe(upstream.instance)

    def _count(self, command: commands.Count) -> None:
        if command.what is Counted.RETRY:
            self._outcome.num_retries += 1
        elif command.what in (Counted.TURNED_AWAY, Counted.REFUSED):
            self._outcome.failure = str(command.what)
