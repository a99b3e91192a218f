"""A rank of a source in a process of its own, for the check of fetches.

`python -m kvferry.qualify.fetching.fetch_source` reads a line of JSON with its `Setup`, prints one with the addresses
of its agents, and then answers each `Order` with one, until its standard input ends.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack, closing
from queue import SimpleQueue
from typing import Any

import msgspec

from kvferry import Agent, AgentConfig, LeaseRequest, Notice
from kvferry.options import StagingMemory
from kvferry.qualify.fetching.engine_rank import EngineRank, Geometry, MemoryPath, layouts_of, next_notice
from kvferry.qualify.torch_device import TorchDevice
from kvferry.testing.child_process import ChildProcess
from kvferry.wire.messages import Reference

ANSWER_S = 120.0


class Setup(msgspec.Struct, frozen=True):
    """Which rank it is, on which device, and the (buffer device, staging memory) of each of its agents."""

    kind: str
    number: int
    epoch: str
    rank: int
    tensor_parallel: int
    geometry: Geometry
    memories: tuple[tuple[str, str], ...]


class Order(msgspec.Struct, frozen=True):
    """Lease a request at one of the agents, or withdraw it."""

    agent: int
    request_id: str
    lease_id: str = ""


class FetchSource(ChildProcess):
    """The other process."""

    def __init__(self, setup: Setup) -> None:
        """Raises TransportError when it does not start."""
        super().__init__([sys.executable, "-m", __name__])
        try:
            self.addresses = msgspec.convert(self._ask(setup), tuple[str, ...])
        except BaseException:
            self.kill()
            raise

    def lease(self, agent: int, request_id: str, lease_id: str) -> Reference:
        """Raises TransportError when the process does not answer."""
        return msgspec.convert(self._ask(Order(agent, request_id, lease_id)), Reference)

    def withdraw(self, agent: int, request_id: str) -> None:
        """Other ranks of the target are not there, and will never say that they are done."""
        self._ask(Order(agent, request_id))

    def _ask(self, what: msgspec.Struct) -> Any:
        self.write_line(msgspec.json.encode(what))
        return msgspec.json.decode(self.read_line(ANSWER_S))


def main() -> None:
    """Serve until standard input ends."""
    setup = msgspec.json.decode(sys.stdin.readline(), type=Setup)
    geometry, device = setup.geometry, TorchDevice(setup.kind, setup.number)
    contents = geometry.contents(setup.tensor_parallel, setup.rank)
    at = layouts_of(geometry, setup.tensor_parallel, setup.rank, setup.kind)
    with ExitStack() as stack:
        rank = stack.enter_context(closing(EngineRank(device, at, len(contents))))
        rank.fill(contents)
        agents, notices = [], SimpleQueue[Notice]()
        for number, (buffer_device, staging) in enumerate(setup.memories):
            config = AgentConfig(f"source-{number}", setup.epoch, setup.rank)
            path = MemoryPath(buffer_device, StagingMemory(staging), "auto")
            agents.append(stack.enter_context(rank.open(config, path, notices)))
        _say([agent.address for agent in agents])
        for line in sys.stdin:
            _say(_carried_out(msgspec.json.decode(line, type=Order), agents, notices, geometry))


def _carried_out(
    order: Order, agents: Sequence[Agent], notices: SimpleQueue[Notice], geometry: Geometry
) -> Reference | None:
    agent = agents[order.agent]
    if order.lease_id:
        return agent.lease(
            LeaseRequest(order.request_id, order.lease_id, (geometry.table("source"),), geometry.num_tokens)
        )
    agent.withdraw(order.request_id)
    next_notice(notices)
    return None


def _say(answer: object) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
