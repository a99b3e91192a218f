"""Which instances the pods of a Kubernetes cluster are. Pure: pods as its API writes them, URLs and roles.

A pod says by a label whether it is a prefill or a decode engine. One that is going to be deleted is none any more, so
that it gets no new requests while it answers those that it has.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from kvferry.errors import ConfigurationError
from kvferry.router.config import PodSelection, instances_of
from kvferry.router.policy.records import Instance, Role

# Of several pods that are one engine only the first, the leader, listens (LeaderWorkerSet, and DisaggregatedSet).
WORKER_LABEL = "leaderworkerset.sigs.k8s.io/worker-index"
OVER = ("Succeeded", "Failed")


class Metadata(msgspec.Struct, frozen=True):
    uid: str
    name: str = ""
    labels: dict[str, str] = {}
    version: str = msgspec.field(default="", name="resourceVersion")
    deletion: str = msgspec.field(default="", name="deletionTimestamp")


class Port(msgspec.Struct, frozen=True):
    number: int = msgspec.field(name="containerPort")
    name: str = ""


class Container(msgspec.Struct, frozen=True):
    ports: tuple[Port, ...] = ()
    restart: str = msgspec.field(default="", name="restartPolicy")


class PodSpec(msgspec.Struct, frozen=True):
    """Init containers that are always restarted are sidecars; others have ended when the pod serves."""

    containers: tuple[Container, ...] = ()
    init_containers: tuple[Container, ...] = msgspec.field(default=(), name="initContainers")


class PodStatus(msgspec.Struct, frozen=True):
    phase: str = ""
    ip: str = msgspec.field(default="", name="podIP")


class Pod(msgspec.Struct, frozen=True):
    metadata: Metadata
    spec: PodSpec = PodSpec()
    status: PodStatus = PodStatus()


class ListMetadata(msgspec.Struct, frozen=True):
    version: str = msgspec.field(default="", name="resourceVersion")


class PodList(msgspec.Struct, frozen=True):
    """What the API answers to a list; a watch begins at its version. Each pod is read by itself."""

    metadata: ListMetadata
    items: tuple[msgspec.Raw, ...]


class Event(msgspec.Struct, frozen=True):
    """A line of a watch: ADDED, MODIFIED, DELETED with a pod, BOOKMARK with a version, ERROR with a status."""

    type: str
    object: msgspec.Raw


class Bookmark(msgspec.Struct, frozen=True):
    """How far the watch has come, where nothing that was selected has changed."""

    metadata: ListMetadata


class Status(msgspec.Struct, frozen=True):
    """What the API says where it does not answer with pods."""

    code: int = 0
    message: str = ""


def pods_of(bodies: Iterable[msgspec.Raw]) -> tuple[list[Pod], list[str]]:
    """The pods, and what is wrong with those that cannot be read: a cluster has many, and may be newer than this."""
    pods, warnings = [], []
    for body in bodies:
        try:
            pods.append(decode(body, Pod))
        except ValueError as error:
            warnings.append(f"a pod cannot be read: {error}")
    return pods, warnings


Answer = TypeVar("Answer", PodList, Event, Pod, Bookmark, Status)


def decode(body: bytes | msgspec.Raw, kind: type[Answer]) -> Answer:
    """A body, decoded as this kind. Raises ValueError for what the API does not answer."""
    return msgspec.json.decode(body, type=kind)


@dataclass(frozen=True, slots=True)
class Unusable:
    """Why a pod that was selected can get no requests, in words."""

    reason: str


def instance_of(pod: Pod, selection: PodSelection) -> Instance | Unusable | None:
    """What a pod is to the router; None while it is no instance, which may change."""
    labels = pod.metadata.labels
    if pod.metadata.deletion or pod.status.phase in OVER or not pod.status.ip or labels.get(WORKER_LABEL, "0") != "0":
        return None
    value = labels.get(selection.role_label, "")
    if value not in tuple(Role):
        return Unusable(f"label {selection.role_label}: found {value!r}; expected: {' or '.join(Role)}")
    port = port_of(pod.spec, selection.port)
    if port is None:
        known = ", ".join(each.name or str(each.number) for each in ports_of(pod.spec)) or "none"
        return Unusable(f"port: found {known}; expected: a container port named {selection.port!r}")
    host = f"[{pod.status.ip}]" if ":" in pod.status.ip else pod.status.ip
    try:
        (instance,) = instances_of(Role(value), (f"http://{host}:{port}",))
    except ConfigurationError as error:
        return Unusable(str(error))
    return instance


def port_of(spec: PodSpec, wanted: str) -> int | None:
    """The port by number or name, or None. The first with the name counts, as for Services, and sidecars come last."""
    if wanted.isdecimal():
        return int(wanted)
    return next((port.number for port in ports_of(spec) if port.name == wanted), None)


def ports_of(spec: PodSpec) -> list[Port]:
    sidecars = [container for container in spec.init_containers if container.restart == "Always"]
    return [port for container in (*spec.containers, *sidecars) for port in container.ports]


class KnownPods:
    """The known pods by uid, since an address may be another pod's a moment later."""

    def __init__(self, selection: PodSelection) -> None:
        self._selection = selection
        self._instances: dict[str, Instance] = {}
        self._told: dict[str, str] = {}

    @property
    def instances(self) -> frozenset[Instance]:
        return frozenset(self._instances.values())

    def replace(self, pods: Iterable[Pod]) -> list[str]:
        """Keep these pods and no others. Return what to warn of, once for each pod."""
        pods = tuple(pods)
        uids = {pod.metadata.uid for pod in pods}
        for uid in [*self._instances, *self._told]:
            if uid not in uids:
                self.remove(uid)
        return [warning for pod in pods for warning in self.put(pod)]

    def put(self, pod: Pod) -> list[str]:
        """Take a pod that is new or has changed. Return what to warn of."""
        uid, found = pod.metadata.uid, instance_of(pod, self._selection)
        if isinstance(found, Instance):
            self._instances[uid] = found
            self._told.pop(uid, None)
            return []
        self._instances.pop(uid, None)
        if found is None or self._told.get(uid) == found.reason:
            return []
        self._told[uid] = found.reason
        return [f"pod {pod.metadata.name} gets no requests: {found.reason}"]

    def remove(self, uid: str) -> None:
        self._instances.pop(uid, None)
        self._told.pop(uid, None)


# Names as Kubernetes writes them: https://kubernetes.io/docs/concepts/overview/working-with-objects/labels/
NAME = r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
DOMAIN = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*"
LABEL = re.compile(rf"({DOMAIN}/)?{NAME}")
PORT_NAME = re.compile(r"(?=.{1,15}$)(?=.*[a-z])(?!.*--)[a-z0-9]([-a-z0-9]*[a-z0-9])?")
NAMESPACE = re.compile(r"(?=.{1,63}$)[a-z0-9]([-a-z0-9]*[a-z0-9])?")


def check_selection(selection: PodSelection) -> PodSelection:
    """Return the selection. Raises ConfigurationError for what no API server takes. The server checks the selector."""
    if not selection.selector.strip():
        expected = "labels, such as app.kubernetes.io/instance=kvferry"
        raise ConfigurationError("--kubernetes-selector is empty", found=repr(selection.selector), expected=expected)
    if not LABEL.fullmatch(selection.role_label):
        expected = "the key of a label, such as kvferry.io/role"
        raise ConfigurationError("invalid --kubernetes-role-label", found=selection.role_label, expected=expected)
    if selection.namespace and not NAMESPACE.fullmatch(selection.namespace):
        expected = "lower case letters, digits and hyphens, such as inference"
        raise ConfigurationError("invalid --kubernetes-namespace", found=selection.namespace, expected=expected)
    is_number = selection.port.isdecimal() and 0 < int(selection.port) < 65536
    if not is_number and not PORT_NAME.fullmatch(selection.port):
        expected = "the name of a container port, such as http, or a number from 1 to 65535"
        raise ConfigurationError("invalid --kubernetes-port", found=selection.port, expected=expected)
    return selection
