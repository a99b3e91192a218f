"""Transport over NIXL with its UCX backend: RDMA where there is a NIC, cross-memory attach or tcp where there is none.

Transfers are posted with `initialize_xfer`; prepared descriptor lists (`make_prepped_xfer`) are not used, because each
request has other rows.

What had to be learned about NIXL 1.5 and is relied on here:

* A flipped byte in agent metadata crashes the process that loads it, and a blob that parses half-way spoils its agent
  name for the life of the process. So the blob travels in a frame with length and digest, and a name is used once.
* Nothing can be cancelled. Releasing a handle that is in progress does not stop its bytes, and over tcp neither does
  removing the remote agent. So a handle is kept until it is terminal, and so is its ticket. The only other fence is
  the end of the agent, which takes down the worker that moves the bytes.
* There are no time limits: a stopped peer leaves a transfer in progress without end. The lease has the time limit.
* An agent is not thread-safe: it belongs to the thread that polls. The progress thread would busy-poll a core, so
  progress is made in `poll`, for peers that read from us too; hence `progress_interval_s`.
* Over cross-memory attach, posting *is* copying (one system call per descriptor), so long posts go in parts.
* A connection that has failed, as after an outage of the network, stays failed: NIXL ends all that is in progress over
  it. So a part that is read is posted once more, over a new connection. One that is written is not: what the first
  attempt has sent may arrive later than the second one's end.
* Over tcp UCX answers reads itself, in the process whose memory is read, and ends that process where it cannot, because
  the reader has died ("Fatal: unexpected error: Endpoint timeout"). So others are chosen where they work
  (`transport.selection.candidates`).
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from dataclasses import dataclass, field
from itertools import count
from typing import Any
from uuid import uuid4

import msgspec

from kvferry.errors import TransportError
from kvferry.plan.programs.copies import Copies
from kvferry.transport.base import Completion, Direction, Memory, Ticket
from kvferry.transport.descriptors import decode
from kvferry.transport.memory_kind import MemoryKind, kind_of
from kvferry.transport.nixl.descriptor_lists import (
    PART_BYTES,
    PART_ROWS,
    Devices,
    Part,
    cut_by_kind,
    descriptor_list,
)
from kvferry.transport.nixl.library import load_nixl
from kvferry.transport.nixl.metadata import DECODER, NixlDescriptor, seal, unseal
from kvferry.transport.nixl.remote_agents import RemoteAgents
from kvferry.transport.posting import Posting, connected
from kvferry.transport.registered_memory import Regions, Registry

# The connection has failed; or another transfer has found out, and NIXL knows the agent no more.
DISCONNECTED = ("NIXL_ERR_REMOTE_DISCONNECT", "NIXL_ERR_NOT_FOUND")


@dataclass(frozen=True, slots=True)
class Peer:
    """A connected peer: its agent's name, and its memory."""

    agent: str
    regions: Regions
    devices: Devices


@dataclass(slots=True, eq=False)
class Job:
    """An open ticket. `waiting` are parts not posted yet, `active` those in progress with their handles, `failed` those
    that are posted a second time, and `reason` why; `num_posted` counts posted ones."""

    ticket: Ticket
    peer: str
    agent: str
    operation: str
    waiting: deque[Part]
    num_posted: int = 0
    active: list[tuple[Any, Part]] = field(default_factory=list)
    failed: list[Part] = field(default_factory=list)
    reason: str = ""
    error: str = ""

    def stop_posting(self, error: str) -> None:
        """Post no more. Parts in progress stay active: their bytes still move."""
        self.waiting.clear()
        self.error = self.error or error

    def disconnected(self, part: Part, error: str) -> None:
        """Read a part once more, unless that was its second time or nothing is posted any more."""
        if self.error or self.operation != Direction.READ.name or any(part is each for each in self.failed):
            self.stop_posting(error)
            return
        self.reason = error
        self.failed.append(part)
        self.waiting.appendleft(part)


class NixlTransport:
    """Reads and writes peers' memory through one NIXL agent, whose name is new with every instance.

    All methods must be called by one thread. Raises TransportError when NIXL or its UCX backend cannot be loaded.
    """

    name = "nixl"
    copies_once = False
    # A peer's READ over cross-memory attach ends only after this process has made progress.
    progress_interval_s = 0.002

    def __init__(self) -> None:
        api, self._errors = load_nixl()
        self._name = f"kvferry-{uuid4().hex}"
        config = api.nixl_agent_config(
            enable_prog_thread=False, enable_listen_thread=False, backends=["UCX"], num_threads=0
        )
        try:
            self._agent: Any = api.nixl_agent(self._name, config)
        except self._errors as error:
            raise TransportError(
                "NIXL cannot create its UCX backend",
                found=repr(error),
                hint="kvferry doctor looks at UCX and its settings",
            ) from error
        self._numbers = count(1)
        self._registry = Registry(takes_devices=True)
        self._devices = Devices()
        self._registered: dict[Memory, Any] = {}
        self._peers: dict[str, Peer] = {}
        self._remote_agents = RemoteAgents(self._agent, self._errors, self._name)
        self._jobs: list[Job] = []
        # Parts that have moved, by peer.
        self._num_moved: Counter[str] = Counter()
        self._is_closed = False

    def register(self, memory: Memory) -> None:
        """Raises TransportError when the memory overlaps registered memory or NIXL refuses it."""
        kind = kind_of(memory.device)
        self._registry.add(memory)
        place = (memory.address, memory.size_bytes, memory.device_id, "")
        try:
            self._registered[memory] = self._agent.register_memory([place], kind)
        except self._errors as error:
            self._registry.remove(memory)
            hint = "kvferry doctor looks at UCX and its settings" if kind is MemoryKind.VRAM else ""
            raise TransportError(
                f"NIXL cannot register {memory.device} memory", found=repr(error), hint=hint
            ) from error
        self._devices = self._own_devices()

    def unregister(self, memory: Memory) -> None:
        """Raises TransportError when it is not registered. Without RDMA hardware peers can still reach it."""
        self._registry.remove(memory)
        self._devices = self._own_devices()
        try:
            self._agent.deregister_memory(self._registered.pop(memory))
        except self._errors as error:
            raise TransportError("NIXL cannot deregister memory", found=repr(error)) from error

    def descriptor(self) -> bytes:
        """Raises TransportError when there are more regions than a peer accepts, or NIXL does not describe itself."""
        self._registry.check_describable()
        try:
            metadata = bytes(self._agent.get_agent_metadata())
        except self._errors as error:
            raise TransportError("NIXL cannot describe its memory", found=repr(error)) from error
        body = msgspec.msgpack.encode(
            NixlDescriptor(self._name, self._registry.extents, metadata, self._device_of_each())
        )
        return seal(body)

    def connect(self, peer: str, descriptor: bytes) -> None:
        """Raises TransportError when the descriptor is damaged, its own, or NIXL cannot load it."""
        self.disconnect(peer)
        known = decode(peer, unseal(peer, descriptor), DECODER)
        if known.agent == self._name:
            raise TransportError(f"peer {peer!r} is this transport itself")
        regions, devices = Regions.of(known.regions), Devices.of(known.regions, known.devices)
        self._remote_agents.load(known.agent, known.metadata, {job.agent for job in self._jobs})
        self._peers[peer] = Peer(known.agent, regions, devices)

    def carriers(self, peer: str) -> tuple[str, ...]:
        """The transports that UCX reports for the endpoints of this peer; UCX settles them with the first copy."""
        known = self._peers.get(peer)
        return self._remote_agents.carriers(known.agent) if known else ()

    def disconnect(self, peer: str) -> None:
        """Disconnect a peer. Its open tickets end with an error as soon as NIXL says that no byte moves any more."""
        if self._peers.pop(peer, None) is None:
            return
        self._num_moved.pop(peer, None)
        for job in self._jobs:
            if job.peer == peer:
                job.stop_posting(f"peer {peer!r} was disconnected")
        self._unload_idle_agents()

    def post(self, peer: str, copies: Copies, direction: Direction) -> Ticket:
        """Raises TransportError when the peer is not connected or a row leaves registered memory."""
        known = connected(self._peers, peer)
        posting = Posting(peer, self._registry.regions, known.regions, copies, direction)
        local_address, remote_address, length = posting.columns(PART_BYTES)
        local, remote = descriptor_list(local_address, length), descriptor_list(remote_address, length)
        on_device = self._devices.mark(local, self._registry.regions), known.devices.mark(remote, known.regions)
        parts = cut_by_kind(local, remote, on_device)
        job = Job(Ticket(next(self._numbers)), peer, known.agent, direction.name, parts)
        self._jobs.append(job)
        return job.ticket

    def cancel(self, ticket: Ticket) -> None:
        for job in self._jobs:
            if job.ticket == ticket:
                job.stop_posting("cancelled")

    def poll(self) -> list[Completion]:
        if not self._is_closed:
            self._make_progress()
        ended = [job for job in self._jobs if not job.waiting and not job.active]
        if ended:
            self._jobs = [job for job in self._jobs if job.waiting or job.active]
            self._unload_idle_agents()
        return [Completion(job.ticket, job.error) for job in ended]

    def moved(self, peer: str) -> int:
        return int(self._num_moved[peer])

    def close(self) -> None:
        """Ends the agent: with its worker gone, nothing can move bytes any more, terminal or not."""
        if self._is_closed:
            return
        self._is_closed = True
        for job in self._jobs:
            job.stop_posting("this transport was closed")
            for handle, _ in job.active:
                self._quietly(self._agent.release_xfer_handle, handle)
            job.active.clear()
        self._remote_agents.close()
        for registered in self._registered.values():
            self._quietly(self._agent.deregister_memory, registered)
        self._peers.clear()
        self._registered.clear()
        self._registry.clear()
        del self._agent

    def _device_of_each(self) -> tuple[tuple[str, int], ...]:
        """The device of each registered region, in the order of registration, like their extents."""
        return tuple((memory.device, memory.device_id) for memory in self._registry.memories)

    def _own_devices(self) -> Devices:
        return Devices.of(self._registry.extents, self._device_of_each())

    def _make_progress(self) -> None:
        # Notifications are not used; asking for them is what makes progress for peers.
        self._quietly(self._agent.get_new_notifs)
        for job in self._jobs:
            job.active = [active for active in job.active if self._is_active(job, *active)]
        self._renew_failed()
        budget = PART_ROWS
        # Jobs that have had fewer parts go first, so that a long ticket does not hold up a short one.
        for job in sorted(self._jobs, key=lambda job: job.num_posted):
            while job.waiting and budget > 0 and not self._remote_agents.has_failed(job.agent):
                part = job.waiting.popleft()
                budget -= len(part.local)
                job.num_posted += 1
                self._post_part(job, part)
            if job.num_posted and not (job.waiting or job.active):
                # Posting has copied everything: its completion is reported before the next job is copied.
                return

    def _renew_failed(self) -> None:
        """Replace failed connections that jobs wait for, once nothing is in progress over them."""
        agents = {job.agent for job in self._jobs if job.waiting and self._remote_agents.has_failed(job.agent)}
        for agent in agents - {job.agent for job in self._jobs if job.active}:
            try:
                self._remote_agents.renew(agent)
            except TransportError as error:
                self._give_up_waiting(agent, str(error))

    def _give_up_waiting(self, agent: str, error: str) -> None:
        for job in self._jobs:
            if job.agent == agent and job.waiting:
                job.stop_posting("; ".join(filter(None, (job.reason, error))))

    def _is_active(self, job: Job, handle: Any, part: Part) -> bool:
        try:
            state = self._agent.check_xfer_state(handle)
        except self._errors as error:
            state = repr(error)
        return not self._is_terminal(job, handle, part, state)

    def _post_part(self, job: Job, part: Part) -> None:
        agent = self._agent
        try:
            local = agent.get_xfer_descs(part.local, part.local_kind)
            remote = agent.get_xfer_descs(part.remote, part.remote_kind)
            handle = agent.initialize_xfer(job.operation, local, remote, job.agent)
        except self._errors as error:
            job.stop_posting(f"NIXL refused the transfer: {error!r}")
            return
        try:
            state = agent.transfer(handle)
        except self._errors as error:
            state = repr(error)
        if not self._is_terminal(job, handle, part, state):
            job.active.append((handle, part))

    def _is_terminal(self, job: Job, handle: Any, part: Part, state: str) -> bool:
        if state == "PROC":
            return False
        self._quietly(self._agent.release_xfer_handle, handle)
        if any(lost in state for lost in DISCONNECTED):
            self._remote_agents.failed(job.agent)
            job.disconnected(part, f"NIXL: {state}")
        elif state != "DONE":
            job.stop_posting(f"NIXL: {state}")
        else:
            self._remote_agents.worked(job.agent)
            if job.peer in self._peers:
                self._num_moved[job.peer] += 1
        return True

    def _unload_idle_agents(self) -> None:
        """Forget agents of disconnected peers that have no transfer in progress."""
        needed = {peer.agent for peer in self._peers.values()} | {job.agent for job in self._jobs}
        self._remote_agents.unload_idle(needed)

    def _quietly(self, call: Any, *arguments: Any) -> None:
        """Make a clean-up call: it is fine when NIXL does not know the thing any more."""
        try:
            call(*arguments)
        except self._errors as error:
            logging.getLogger(__name__).debug("%s: %r", call, error)
