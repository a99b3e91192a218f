"""`kvferry serve`: one engine process with its HTTP server and its transfer agent."""

from __future__ import annotations

import asyncio
import gc
import socket
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass

from starlette.types import Scope

from kvferry import AgentConfig
from kvferry.cli import console
from kvferry.cli.serve.joining import NOWHERE, JoinOptions
from kvferry.cli.server import http, listening
from kvferry.cli.server.logs import log_to_stderr
from kvferry.connectors.jobs import Settings
from kvferry.connectors.step_cost import NO_COST
from kvferry.embedded.engine.async_engine import Engine
from kvferry.embedded.http.app import create_app
from kvferry.embedded.http.router_registration import Registrar, RegistrarConfig
from kvferry.embedded.serving.service import ServeInfo
from kvferry.embedded.transfer.agent_transfer import AgentTransfer
from kvferry.embedded.transfer.collector import AgentCollector
from kvferry.errors import FerryError
from kvferry.http.access import UNAUTHORIZED, Access, guarded
from kvferry.http.registration import KEY_PURPOSE
from kvferry.plan.description.layout import contents

EVERYBODY = Access()


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """What to serve, under which names, and where. `as_child` ends the process when standard input closes.

    After SIGTERM, running requests and leases have `drain_s` to end.
    """

    settings: Settings
    agent: AgentConfig
    served_name: str
    failure_policy: str
    host: str
    port: int
    drain_s: float
    as_json: bool
    as_child: bool
    join: JoinOptions = NOWHERE
    access: Access = EVERYBODY


def serve(options: ServeOptions) -> None:
    """Serve until told to stop. Raises ConfigurationError before anything is started that cannot work."""
    log_to_stderr()
    if options.settings.step_cost != NO_COST:
        console.say("step times are simulated (--simulated-step): speeds are not this machine's")
    # The port is taken first: to load a model for half a minute and then fail would be unkind.
    with listening.listen(options.host, options.port) as bound:
        engine = Engine(options.settings)
        asyncio.run(_serve(options, engine, bound))


async def _serve(options: ServeOptions, engine: Engine, bound: socket.socket) -> None:
    async with AsyncExitStack() as undo:
        await engine.start()
        undo.push_async_callback(engine.close)
        transfer = AgentTransfer(options.agent, engine.layout(), engine.memory(), engine.release)
        await transfer.start()
        undo.push_async_callback(transfer.close)
        app = create_app(engine, transfer, _info(options, engine, transfer))
        undo.callback(app.state.service.close)
        app.state.registry.register(AgentCollector(transfer))
        url = listening.url_of(bound)
        # What torch and the model's code have made stays. A collector that looks at it again holds up all answers for
        # a moment, and the end of the process for seconds.
        gc.collect()
        gc.freeze()
        _announce(options, url, transfer.agent.address)
        registrar = _registrar(options, url)
        registering = asyncio.create_task(registrar.run())
        undo.push_async_callback(_finish, registrar, registering)

        def announce_end() -> None:
            app.state.service.drain()
            registrar.leave()

        def turn_away(scope: Scope, request_id: str) -> None:
            app.state.service.metrics.count_request("refused", UNAUTHORIZED)

        ends = [transfer.wait_until_over(), *([http.stdin_closed()] if options.as_child else [])]
        drain = http.Drain(options.drain_s, announce_end, engine.idle)
        await http.run(guarded(app, options.access, turn_away), bound, ends, http.ENGINE_GRACE_S, drain)
        if transfer.failure:
            # Better no process than one that cannot do its job: whoever watches over it starts a new one.
            raise FerryError(
                transfer.failure, found="an internal error in its thread", hint="the log above has its traceback"
            )


def _info(options: ServeOptions, engine: Engine, transfer: AgentTransfer) -> ServeInfo:
    return ServeInfo(
        model=options.served_name,
        engine_id=options.agent.engine_id,
        created=int(time.time()),
        policy=options.failure_policy,
        epoch=transfer.agent.party.epoch,
        cache=contents(engine.layout()),
    )


def _registrar(options: ServeOptions, url: str) -> Registrar:
    key = options.agent.token.derived(KEY_PURPOSE) if options.agent.token else b""
    join = options.join
    return Registrar(RegistrarConfig(join.routers, join.url or url, join.roles, key))


async def _finish(registrar: Registrar, registering: asyncio.Task[None]) -> None:
    """Routers hear of the end, if they have not yet; that has a time limit of its own."""
    registrar.leave()
    await asyncio.wait({registering})


def _announce(options: ServeOptions, url: str, transfer_address: str) -> None:
    facts = {
        "event": "ready",
        "engine_id": options.agent.engine_id,
        "model": options.served_name,
        "url": url,
        "transfer_address": transfer_address,
    }
    if options.as_json:
        console.data(facts)
    else:
        console.say(f"{facts['engine_id']}: {facts['model']} at {url}/v1, transfers at {transfer_address}")
