"""The router as a deployment of Ray Serve."""

from __future__ import annotations

from typing import Any

from kvferry.cli import environment
from kvferry.cli.options import context_of, record_of
from kvferry.cli.route.command import RouteOptions, route
from kvferry.cli.route.server import config_of
from kvferry.errors import FerryError
from kvferry.http.access import guarded
from kvferry.http.asgi import without_root
from kvferry.http.registration import Side
from kvferry.router.fleet.instance import Origin
from kvferry.router.http.app import create_app
from kvferry.router.policy.records import Instance, Role

LEASE_S = 5.0
"""An engine that was not heard of for so long is no instance any more. It says every second that it is there."""


class Router:
    """Serves HTTP as `kvferry route` does, and knows its engines from what they say through Serve.

    There is one: prefixes, circuit breakers and open requests are counted where they are.
    """

    def __init__(self, words: tuple[str, ...], token_file: str, *engines: object) -> None:
        """`engines` are the deployments that start with this one. Raises ConfigurationError."""
        environment.share_api_key()
        words = ("--accept-registrations", "--token-file", token_file, *words)
        options = record_of(RouteOptions, context_of(words, route))
        self._app, self._access = create_app(config_of(options)), options.http_access.checked()
        self._pool = self._app.state.pool

    def __serve_build_asgi_app__(self) -> Any:
        # Serve passes on the whole path, that of the application's route_prefix included.
        return without_root(guarded(self._app, self._access, self._app.turn_away))

    async def announce(self, url: str, side: str, leaving: bool) -> dict[str, int]:
        """An engine is there, or leaves; what it has to do now."""
        instance = Instance(url, Role(side))
        if leaving:
            self._pool.remove(instance, Origin.RAY)
            return {}
        self._pool.add(instance, Origin.RAY, LEASE_S)
        num_requests, num_tokens = self._pool.in_flight(instance)
        return {Side.PREFILL: num_tokens, Side.DECODE: num_requests}

    def check_health(self) -> None:
        """Asked by Serve, which replaces what raises."""
        if self._pool.draining:
            raise FerryError("a task of the router has ended", hint="the log above has its traceback")
