"""`kvferry serve`: one engine process with its HTTP server and its transfer agent."""

from __future__ import annotations

import asyncio
import gc
import socket
import time
from contextlib import AsyncExitStack
from functools import partial

from starlette.types import Scope

from kvferry import AgentConfig
from kvferry.cli import console
from kvferry.cli.serve.command import ServeOptions
from kvferry.cli.serve.joining import joined
from kvferry.cli.server import http, listening
from kvferry.cli.server.logs import log_to_stderr
from kvferry.connectors.jobs import Settings
from kvferry.connectors.step_cost import NO_COST
from kvferry.embedded.engine.async_engine import Engine
from kvferry.embedded.http.app import create_app
from kvferry.embedded.serving.service import ServeInfo
from kvferry.embedded.transfer.agent_report import AgentCollector
from kvferry.embedded.transfer.agent_transfer import AgentTransfer
from kvferry.errors import FerryError
from kvferry.http.access import UNAUTHORIZED, Access, guarded
from kvferry.plan.description.layout import contents


def serve(options: ServeOptions, settings: Settings, config: AgentConfig, access: Access) -> None:
    """Serve until told to stop. Raises ConfigurationError before anything is started that cannot work."""
    log_to_stderr()
    if settings.step_cost != NO_COST:
        console.say("step times are simulated (--simulated-step): speeds are not this machine's")
    # The port is taken first: to load a model for half a minute and then fail would be unkind.
    with listening.listen(options.host, options.port) as bound:
        engine = Engine(settings)
        asyncio.run(_serve(options, engine, config, access, bound))


async def _serve(
    options: ServeOptions, engine: Engine, config: AgentConfig, access: Access, bound: socket.socket
) -> None:
    async with AsyncExitStack() as undo:
        await engine.start()
        undo.push_async_callback(engine.close)
        transfer = AgentTransfer(config, engine.cache(), engine.release)
        await transfer.start()
        undo.push_async_callback(transfer.close)
        app = create_app(engine, transfer, _info(options, engine, transfer))
        undo.callback(app.state.service.prompts.close)
        app.state.registry.register(AgentCollector(transfer))
        url = listening.url_of(bound)
        # What torch and the model's code have made stays. A collector that looks at it again holds up all answers for
        # a moment, and the end of the process for seconds.
        gc.collect()
        gc.freeze()
        name, model, address = options.engine_id, options.served_name, transfer.address
        words = f"{name}: {model} at {url}/v1, transfers at {address}"
        facts = {"engine_id": name, "model": model, "url": url, "transfer_address": address}
        registrar = await undo.enter_async_context(joined(options.join, url, config.token))

        def announce_end() -> None:
            app.state.service.drain()
            registrar.leave()

        def turn_away(scope: Scope, request_id: str) -> None:
            app.state.service.metrics.count_request("refused", UNAUTHORIZED)

        ends = [
            engine.wait_until_over(),
            transfer.wait_until_over(),
            *([http.stdin_closed()] if options.as_child else []),
        ]
        drain = http.Drain(options.drain_timeout, announce_end, engine.idle)
        announce = partial(console.announce, options.as_json, words, **facts)
        await http.run(guarded(app, access, turn_away), bound, ends, http.ENGINE_GRACE_S, drain, announce)
        _check_ending(engine, transfer)


def _check_ending(engine: Engine, transfer: AgentTransfer) -> None:
    """Better no process than one that cannot do its job: who watches over it starts a new one. Raises FerryError."""
    hint = "the log above has its traceback"
    if engine.failure:
        raise FerryError("the engine has stopped", found=engine.failure, hint=hint)
    if transfer.failure:
        raise FerryError(transfer.failure, found="an internal error in its thread", hint=hint)


def _info(options: ServeOptions, engine: Engine, transfer: AgentTransfer) -> ServeInfo:
    return ServeInfo(
        model=options.served_name,
        engine_id=options.engine_id,
        created=int(time.time()),
        policy=options.failure_policy,
        epoch=transfer.agent.party.epoch,
        cache=contents(engine.layout()),
    )
