"""The only owner of threads and sockets of the transfer: feeds sessions with events and does what they command.

Names are loaded when they are used: commands that only read a token do without the libraries of the control channel.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvferry.agent.cache import Cache
    from kvferry.agent.config import STAGING_BYTES, AgentConfig, Notice, new_epoch, new_lease_id, staging_named
    from kvferry.agent.control.shared_token import NO_TOKEN, SharedToken, read_token
    from kvferry.agent.loop.agent import Agent
    from kvferry.agent.opening import open_agent

__all__ = [
    "NO_TOKEN",
    "STAGING_BYTES",
    "Agent",
    "AgentConfig",
    "Cache",
    "Notice",
    "SharedToken",
    "new_epoch",
    "new_lease_id",
    "open_agent",
    "read_token",
    "staging_named",
]

_FILES = {
    "Agent": "loop.agent",
    "Cache": "cache",
    "open_agent": "opening",
    **dict.fromkeys(("NO_TOKEN", "SharedToken", "read_token"), "control.shared_token"),
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_FILES.get(name, 'config')}"), name)
