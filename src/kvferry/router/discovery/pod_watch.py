"""Pods of a Kubernetes cluster as instances: lists them once, and then watches what changes.

The official client finds the API server and its credentials: the service account of this pod, or a kubeconfig.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from kvferry.errors import ConfigurationError
from kvferry.extras import missing_extra
from kvferry.http.client_errors import client_error_text
from kvferry.router.config import PodSelection
from kvferry.router.discovery.pods import Bookmark, Event, KnownPods, PodList, Status, decode, pods_of
from kvferry.router.discovery.section import Section

try:
    from kubernetes.aio import client
    from kubernetes.aio import config as cluster_config
    from kubernetes.aio.client.exceptions import ApiException
    from kubernetes.aio.config.config_exception import ConfigException
except ModuleNotFoundError as error:
    raise (missing_extra(error, "kubernetes") or error) from error

# The server ends a watch after this time, and the next one goes on from there. So a watch that has fallen silent, such
# as by a cable that was cut, costs no more than this and the slack.
WATCH_S = 60
SLACK_S = 15.0
LIST_S = 10.0
# The pause after an error, and what it is doubled up to.
RETRY_S, MAX_RETRY_S = 1.0, 30.0
MAX_LIST_BYTES = 256 * 2**20
MAX_MESSAGE = 200
GONE = 410
# The server understands and refuses: it will refuse the next time as well.
REFUSALS = (400, 401, 403, 404, 422)
NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")

logger = logging.getLogger(__name__)


class WatchEnded(Exception):
    """A list or a watch has failed, in words; the next one may succeed."""

    def __init__(self, reason: str, status: int = 0) -> None:
        super().__init__(reason)
        self.status = status


class PodWatch:
    """Keeps the pool equal to the pods that a selector names. While the API server cannot be asked, everything stays as
    it was: probes tell what is dead. `kubeconfig` is a file. Empty: the service account counts, or else KUBECONFIG."""

    def __init__(
        self,
        selection: PodSelection,
        section: Section,
        kubeconfig: str = "",
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._selection = selection
        self._pause = pause
        self._section = section
        self._kubeconfig = kubeconfig
        self._pods = KnownPods(selection)
        self._api: Any = None
        self._namespace = selection.namespace
        self._version = ""
        self._trouble = ""

    async def begin(self) -> None:
        """Ask once, so that what cannot work is said before anything is served.

        Raises ConfigurationError where there is no cluster to ask, or its server refuses; a server that does not
        answer is only logged. Safe to call twice.
        """
        if self._api is not None:
            return
        try:
            await self._connect()
            await self._list()
        except WatchEnded as ended:
            if ended.status in REFUSALS:
                await self.aclose()
                raise ConfigurationError(
                    "the Kubernetes API refuses to list pods",
                    found=str(ended),
                    expected=f"pods of {self._selection.selector!r} in the namespace {self._namespace!r}",
                    hint="the service account needs get, list and watch of pods; see docs/kubernetes.md",
                ) from ended
            logger.warning("the Kubernetes API cannot be asked yet: %s", ended)
        except BaseException:
            await self.aclose()
            raise

    async def run(self) -> None:
        """Follow the pods for ever."""
        await self.begin()
        wait_s, clock = RETRY_S, asyncio.get_running_loop().time
        while True:
            began_s = clock()
            has_ended_well = await self._follow_once()
            if clock() - began_s >= RETRY_S:
                wait_s = RETRY_S
                if has_ended_well:
                    continue
            await self._pause(wait_s)
            wait_s = min(2 * wait_s, MAX_RETRY_S)

    async def _follow_once(self) -> bool:
        """Run one watch. Return whether the server has ended it because its time was over."""
        try:
            await self._follow()
        except WatchEnded as ended:
            self._tell(ended)
        except Exception:
            # Nobody else would notice that pods are not followed any more.
            logger.exception("a defect has ended the watch of pods, which begins anew")
        else:
            self._section.renew()
            return True
        self._version = ""
        return False

    def _tell(self, ended: WatchEnded) -> None:
        """Log why a watch has ended. The same trouble is logged once, until a list succeeds again."""
        # The server does not keep what happened since. The next list says what is there now.
        if ended.status == GONE:
            logger.info("the watch of pods begins anew: %s", ended)
        elif str(ended) != self._trouble:
            self._trouble = str(ended)
            logger.warning("pods are not watched, instances stay as they are: %s", ended)

    async def aclose(self) -> None:
        """Close the client of the API. Safe to call twice."""
        api, self._api = self._api, None
        if api is not None:
            await api.api_client.close()

    async def _connect(self) -> None:
        settings = client.Configuration()
        try:
            await self._load(settings)
            self._api = client.CoreV1Api(client.ApiClient(settings))
        except Exception as error:  # noqa: BLE001 - the client raises anything for an invalid kubeconfig
            raise ConfigurationError(
                "there is no Kubernetes cluster to ask",
                found=_without_contents(error),
                expected="a pod with a service account, or a kubeconfig",
                hint="set KUBECONFIG, or list engines with --prefill and --decode",
            ) from None

    async def _load(self, settings: Any) -> None:
        """Load credentials, and the namespace where none is named. Raises what the client raises."""
        if self._kubeconfig:
            await self._load_file(settings, self._kubeconfig)
            return
        try:
            cluster_config.load_incluster_config(client_configuration=settings)
            self._namespace = self._namespace or NAMESPACE_FILE.read_text().strip()
            return
        except ConfigException as error:
            as_a_pod = _without_contents(error)
        try:
            await self._load_file(settings, None)
        except ConfigException as error:
            raise ConfigException(f"as a pod: {as_a_pod}; by kubeconfig: {_without_contents(error)}") from None

    async def _load_file(self, settings: Any, path: str | None) -> None:
        await cluster_config.load_kube_config(path, client_configuration=settings)
        _, active = cluster_config.list_kube_config_contexts(path)
        self._namespace = self._namespace or active["context"].get("namespace", "default")

    async def _follow(self) -> None:
        """List the pods if their version is not known, then watch until the server ends that. Raises WatchEnded."""
        if not self._version:
            await self._list()
        watch = {"watch": True, "allow_watch_bookmarks": True, "timeout_seconds": WATCH_S}
        async with self._asking(WATCH_S + SLACK_S, resource_version=self._version, **watch) as response:
            # The client's buffer takes lines that are larger than what a cluster stores of one object.
            while line := await response.content.readline():
                self._take(decode(line, Event))

    async def _list(self) -> None:
        async with self._asking(LIST_S) as response:
            listed = decode(await _body(response), PodList)
        pods, warnings = pods_of(listed.items)
        self._warn([*warnings, *self._pods.replace(pods)])
        self._section.set(self._pods.instances)
        self._version = listed.metadata.version
        if self._trouble:
            self._trouble = ""
            logger.info("pods are watched again")

    @asynccontextmanager
    async def _asking(self, deadline_s: float, **arguments: Any) -> AsyncIterator[aiohttp.ClientResponse]:
        """A response whose body the caller reads inside. Raises WatchEnded, also for errors while it is read."""
        ask, selector = self._api.list_namespaced_pod_without_preload_content, self._selection.selector
        try:
            async with asyncio.timeout(deadline_s):
                response = await ask(self._namespace, label_selector=selector, _request_timeout=deadline_s, **arguments)
                try:
                    if response.status != 200:
                        raise WatchEnded(f"{response.status} {_message(await _body(response))}", response.status)
                    yield response
                finally:
                    response.close()
        # ConfigException: the client reads its token anew from time to time.
        except (ApiException, ConfigException, aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise WatchEnded(client_error_text(error)) from error

    def _take(self, event: Event) -> None:
        if event.type == "ERROR":
            status = decode(event.object, Status)
            raise WatchEnded(f"{status.code} {status.message}", status.code)
        if event.type == "BOOKMARK":
            self._version = decode(event.object, Bookmark).metadata.version
            return
        pods, warnings = pods_of([event.object])
        for pod in pods:
            if event.type == "DELETED":
                self._pods.remove(pod.metadata.uid)
            else:
                warnings += self._pods.put(pod)
            self._version = pod.metadata.version
        self._warn(warnings)
        self._section.set(self._pods.instances)

    def _warn(self, warnings: list[str]) -> None:
        for warning in warnings:
            logger.warning("%s", warning)


async def _body(response: aiohttp.ClientResponse) -> bytes:
    """The whole body. Raises ValueError for one that is longer than any cluster's."""
    found = bytearray()
    async for piece in response.content.iter_any():
        found += piece
        if len(found) > MAX_LIST_BYTES:
            raise ValueError(f"a list of more than {MAX_LIST_BYTES} bytes")
    return bytes(found)


def _message(body: bytes) -> str:
    """The message of a refusal, which may come from a proxy on the way."""
    try:
        return decode(body, Status).message
    except ValueError:
        return body[:MAX_MESSAGE].decode(errors="replace").strip()


def _without_contents(error: Exception) -> str:
    """The error up to the first brace: the client's messages quote parts of a kubeconfig, tokens included."""
    return f"{type(error).__name__}: {str(error).partition('{')[0]}"[:MAX_MESSAGE]
