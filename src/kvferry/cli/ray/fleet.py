"""The fleet of `kvferry up --on ray`: what `up` needs of it, done by Ray."""

from __future__ import annotations

import logging
import signal
import socket
import time
from typing import Any

import msgspec
import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.config import HTTPOptions
from ray.serve.exceptions import RayServeException

from kvferry.cli import console, environment
from kvferry.cli.http_get import get
from kvferry.cli.options import HERE
from kvferry.cli.ray.application import application_of
from kvferry.cli.ray.settings import RaySettings
from kvferry.cli.server import listening
from kvferry.errors import ConfigurationError
from kvferry.http.registration import MEMBERS_PATH, Side
from kvferry.system import os_error_text

NAME = "kvferry"
POLL_S = 0.5
ANSWER_S = 10.0
OURS = "kvferry.errors."
FAILED = ("DEPLOY_FAILED", "UNHEALTHY")


class RayFleet:
    """Starts the application on the cluster that is there, and removes it again. Ray mends what breaks."""

    def __init__(self, settings: RaySettings, port: int, ready_s: float) -> None:
        self._settings, self._port, self._ready_s = settings, port, ready_s
        self._is_deployed = self._has_started_serve = False
        self.model = self.url = ""
        self.prefill_urls: tuple[str, ...] = ()
        self.decode_urls: tuple[str, ...] = ()

    def __enter__(self) -> RayFleet:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            if self._is_deployed:
                serve.delete(NAME)
            # Its port may be one that nobody else would look for; what others have put there meanwhile stays.
            if self._has_started_serve and not serve.status().applications:
                serve.shutdown()
        except (RayError, RayServeException, TimeoutError) as error:
            console.say(f"the Ray cluster does not say whether the fleet has ended: {error}")
        finally:
            ray.shutdown()

    @property
    def names(self) -> str:
        """What is running, in words."""
        return "the engines and the router on Ray" if self._is_deployed else "nothing"

    def start(self) -> None:
        """Returns when all engines are ready. Raises ConfigurationError, before anything is started where it can."""
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        _connect(environment.ray_address())
        application = application_of(self._settings)
        status = serve.status()
        if NAME in status.applications:
            hint = f"remove it: serve shutdown; or in Python: serve.delete({NAME!r})"
            found = status.applications[NAME].status.value
            raise ConfigurationError(f"the application {NAME} is on this cluster already", found=found, hint=hint)
        if status.proxies:
            self._port = self._port or HTTPOptions().port
            _check_serve(self._port)
        else:
            with listening.listen(HERE, self._port) as free:
                self._port = free.getsockname()[1]
            self._has_started_serve = True
            serve.start(http_options={"host": HERE, "port": self._port})
        self._is_deployed = True
        target = serve.RunTarget(target=application, name=NAME, route_prefix="/")
        serve.run_many([target], wait_for_applications_running=False)
        self._await(time.monotonic() + self._ready_s)

    def restart_exited(self) -> None:
        """Ray starts again what has died. Raises ConfigurationError when nobody does any more."""
        _state()

    def _await(self, deadline: float) -> None:
        """Returns when all are ready. Raises ConfigurationError when one has failed, or does not come in time."""
        while (state := _state()).status != "RUNNING":
            if state.status in FAILED or time.monotonic() > deadline:
                raise _failed(state)
            time.sleep(POLL_S)
        url = f"http://{HERE}:{self._port}"
        while not self._is_complete(ready := _ready(url)):
            if time.monotonic() > deadline:
                raise ConfigurationError("the router does not know all engines", expected=f"within {self._ready_s:g} s")
            time.sleep(POLL_S)
        # From one answer of the router: by the next one an engine may not be ready any more.
        self.url, self.model = url, ready[Side.DECODE][0].models[0]
        self.prefill_urls, self.decode_urls = (tuple(one.url for one in ready[side]) for side in Side)
        console.say(f"the router is ready at {url}; engines: {', '.join((*self.prefill_urls, *self.decode_urls))}")

    def _is_complete(self, ready: dict[Side, list[Member]]) -> bool:
        return all(len(ready[side]) >= role.min_replicas for side, role in self._settings.roles.items())


def _state() -> Any:
    """What Serve says of the fleet. Raises ConfigurationError when there is none any more."""
    try:
        found = serve.status().applications.get(NAME)
    except (RayError, RayServeException) as error:
        raise ConfigurationError("the Ray cluster does not answer any more", found=str(error)) from error
    if found is None:
        raise ConfigurationError(f"somebody has removed the application {NAME} from this cluster")
    return found


def _check_serve(port: int) -> None:
    """Raises ConfigurationError where Serve, which runs on this cluster, does not listen."""
    try:
        socket.create_connection((HERE, port), ANSWER_S).close()
    except OSError as error:
        found = f"{HERE}:{port}: {os_error_text(error)}"
        hint = "name its port: --port; or end it: serve shutdown"
        raise ConfigurationError("Ray Serve runs already, and does not listen here", found=found, hint=hint) from error


def _connect(address: str) -> None:
    """Raises ConfigurationError where no cluster answers."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        host, _, port = address.rpartition(":")
        if host and port.isdecimal():
            # Ray itself would go on trying for minutes.
            socket.create_connection((host.removeprefix("ray://"), int(port)), ANSWER_S).close()
        ray.init(address="auto", log_to_driver=False, logging_level=logging.WARNING)
    except (OSError, ValueError, RayError) as error:
        # A ValueError, among them UnicodeError, is what becomes of an address that is none.
        is_ours = bool(address) and not isinstance(error, RayError)
        found = f"{address}: {os_error_text(error)}" if is_ours else str(error)
        hint = "start one: ray start --head; or name one: RAY_ADDRESS=HOST:PORT"
        raise ConfigurationError("no Ray cluster can be used here", found=found, hint=hint) from error
    for number, handler in handlers.items():
        # Ray's own would abort at SIGTERM, and leave the fleet behind.
        signal.signal(number, handler)


def _failed(state: Any) -> ConfigurationError:
    """What Serve says of an application that does not come up: of our own errors their words, of others the end."""
    messages = [deployment.message.strip() for deployment in state.deployments.values() if deployment.message]
    lines = [line for message in messages for line in message.splitlines()]
    ours = list(dict.fromkeys(line.partition(": ")[2] for line in lines if line.startswith(OURS)))
    found = "; ".join(ours or [message.splitlines()[-1] for message in messages]) or state.message
    hint = "serve status shows more, and Ray's dashboard the logs"
    return ConfigurationError(f"the fleet is {state.status.value} on Ray", found=found, hint=hint)


class Member(msgspec.Struct, frozen=True):
    """An engine as the router tells of it. Other keys are ignored."""

    url: str
    role: str
    ready: bool
    models: tuple[str, ...]


class Members(msgspec.Struct, frozen=True):
    members: tuple[Member, ...]


def _ready(url: str) -> dict[Side, list[Member]]:
    """The engines of each role that are ready, and have said which models they serve. Raises ConfigurationError when
    there is no router of ours."""
    try:
        found = msgspec.json.decode(get(url + MEMBERS_PATH, ANSWER_S), type=Members).members
    except (OSError, ValueError, msgspec.DecodeError) as error:
        hint = "Ray Serve was started before, perhaps with another port: name it with --port"
        raise ConfigurationError(f"there is no router at {url}", found=os_error_text(error), hint=hint) from error
    return {side: [one for one in found if one.ready and one.models and one.role == side] for side in Side}
