"""One engine as a replica of a deployment of Ray Serve: a process of `kvferry serve`, and what Serve asks of it."""

from __future__ import annotations

import asyncio
import logging
import tempfile
import time
from pathlib import Path

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from kvferry.cli.child_processes import Child
from kvferry.cli.http_get import get
from kvferry.cli.ray.scaling import METRIC
from kvferry.errors import FerryError
from kvferry.http.registration import Side
from kvferry.system import os_error_text

ROUTER = "router"
ANNOUNCE_S = 1.0
ANSWER_S = 5.0
END_S = 15.0
"""How long an engine may take to end beside its drain."""
STDERR = Path("/proc/self/fd/2")

logger = logging.getLogger(__name__)


class Engine:
    """It is placed and started by Serve, restarted when it is not healthy, and drained before it is removed.

    A replica that dies takes its process along.
    """

    _announcing: asyncio.Task[None] | None = None
    _child: Child | None = None

    def __init__(self, side: str, words: tuple[str, ...], token_file: str, limits: tuple[float, float]) -> None:
        """`words` are options of `kvferry serve`, `limits` those of its start and its drain in seconds.

        Raises ConfigurationError.
        """
        self._side, (start_s, self._drain_s) = Side(side), limits
        self._load, self._trouble = 0, ""
        context = serve.get_replica_context()
        self._router = serve.get_deployment_handle(ROUTER, context.app_name)
        host = ray.util.get_node_ip_address()
        name = f"{side}-{context.replica_id.unique_id}"
        own = ("--engine-id", name, "--host", host, "--transfer-host", host, "--token-file", token_file)
        self._child = Child(name, ("serve", *own, *words), _log(), port=0)
        try:
            ready = self._child.wait_until_ready(time.monotonic() + start_s)
        except BaseException:
            self._end(self._child)
            raise
        self._url = str(ready["url"])
        # Serve makes replicas on the event loop where it asks them.
        self._announcing = asyncio.get_running_loop().create_task(self._announce_for_ever())

    async def check_health(self) -> None:
        """Raises FerryError when the process has ended or says that it cannot work; Serve then replaces both."""
        if self._child is None or not self._child.running:
            raise FerryError("the engine's process has ended", found=self._child.ending if self._child else "")
        if self._announcing is None or self._announcing.done():
            raise FerryError("the engine does not tell the router any more that it is there")
        await asyncio.to_thread(_ask, f"{self._url}/health")

    def record_autoscaling_stats(self) -> dict[str, float]:
        """What the policy is given: the load that the router counts for this engine."""
        return {METRIC: float(self._load)}

    async def __del__(self) -> None:
        """The end that Serve waits for: no new requests, then whatever is open, then the process."""
        if self._announcing is None or self._child is None:
            return
        self._announcing.cancel()
        await self._announce(leaving=True)
        await asyncio.to_thread(self._end, self._child)

    def _end(self, child: Child) -> None:
        child.drain(self._drain_s + END_S)

    async def _announce_for_ever(self) -> None:
        while True:
            await self._announce(leaving=False)
            await asyncio.sleep(ANNOUNCE_S)

    async def _announce(self, leaving: bool) -> None:
        trouble = ""
        try:
            async with asyncio.timeout(ANSWER_S):
                loads = await self._router.announce.remote(self._url, self._side.value, leaving)
            self._load = loads.get(self._side, 0)
        except (RayError, RayServeException, TimeoutError) as error:
            trouble = str(error) or type(error).__name__
        if trouble and trouble != self._trouble:
            logger.warning("could not register with the router: %s", trouble)
        self._trouble = trouble


def _log() -> Path:
    """Where this process writes, which Ray's dashboard shows; a file in the temporary folder where that is no file."""
    here = STDERR.resolve()
    return here if here.is_file() else Path(tempfile.mkdtemp(prefix="kvferry-")) / "engine.log"


def _ask(url: str) -> None:
    try:
        get(url, ANSWER_S)
    except (OSError, ValueError) as error:
        raise FerryError("the engine is not healthy", found=f"{url}: {os_error_text(error)}") from error
