"""An agent with every transport that it may use."""

from __future__ import annotations

from collections.abc import Callable

from kvferry.agent.cache import Cache
from kvferry.agent.config import AgentConfig, Notice
from kvferry.agent.loop.agent import Agent
from kvferry.transport.registry import open_transports


def open_agent(config: AgentConfig, cache: Cache, notify: Callable[[Notice], None]) -> Agent:
    """The agent of one rank. It listens at `address`; nothing moves before `start`, and `with` does that and `close`.

    `notify` is called on the agent's thread and must return at once. Raises ConfigurationError when the port or the
    wanted transport cannot be had, TransportError when there is not enough memory.
    """
    opened = open_transports(config.transport, config.host, cache.device, cache.buffer_device)
    # The agent takes them over, and closes them whatever happens: between the two nothing may fail.
    return Agent(config, cache, notify, opened.transports, opened.unavailable)
