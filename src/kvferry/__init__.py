"""kvferry moves a request's KV cache from the engine that computed it to the engine that needs it.

This is the API for engines: describe a cache (`kvferry.layout`), open an agent for each rank of the engine, lease what
was computed, fetch into blocks, hear what happened, close. `Agent` tells by a callback, `AsyncAgent` on an event loop.
What `__all__` names here and in `layout`, `kv_transfer_params`, `options` and `devices` is stable: see
docs/api.md. Everything is loaded when it is first used: this import needs no library.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kvferry.version import __version__ as __version__

if TYPE_CHECKING:
    from kvferry.agent.async_agent import AsyncAgent as AsyncAgent
    from kvferry.agent.async_agent import Released as Released
    from kvferry.agent.cache import Cache as Cache
    from kvferry.agent.config import AgentConfig as AgentConfig
    from kvferry.agent.config import Notice as Notice
    from kvferry.agent.config import new_epoch as new_epoch
    from kvferry.agent.config import new_lease_id as new_lease_id
    from kvferry.agent.control.shared_token import SharedToken as SharedToken
    from kvferry.agent.control.shared_token import read_token as read_token
    from kvferry.agent.loop.agent import Agent as Agent
    from kvferry.agent.loop.agent import open_agent as open_agent
    from kvferry.agent.memory.arena import Arena as Arena
    from kvferry.agent.transports.negotiation import PeerReport as PeerReport
    from kvferry.plan.description.prompt import TOKEN_BYTES as TOKEN_BYTES
    from kvferry.plan.description.prompt import UNKNOWN_PROMPT as UNKNOWN_PROMPT
    from kvferry.plan.description.prompt import UNNAMED as UNNAMED
    from kvferry.plan.description.prompt import Prompt as Prompt
    from kvferry.plan.description.prompt import PromptInput as PromptInput
    from kvferry.plan.description.prompt import PromptName as PromptName
    from kvferry.plan.description.tokens import TokenRange as TokenRange
    from kvferry.plan.digests.subject import DigestPolicy as DigestPolicy
    from kvferry.plan.programs.copies import Direction as Direction
    from kvferry.plan.strategy.strategies import Strategy as Strategy
    from kvferry.session.commands import AgentStopped as AgentStopped
    from kvferry.session.commands import BlocksReleased as BlocksReleased
    from kvferry.session.commands import Fetched as Fetched
    from kvferry.session.commands import FetchFailed as FetchFailed
    from kvferry.session.commands import FetchReport as FetchReport
    from kvferry.session.commands import LeaseEnded as LeaseEnded
    from kvferry.session.commands import Located as Located
    from kvferry.session.commands import LocateFailed as LocateFailed
    from kvferry.session.commands import RemoteEngine as RemoteEngine
    from kvferry.session.events import NOT_AHEAD as NOT_AHEAD
    from kvferry.session.events import Ahead as Ahead
    from kvferry.session.events import FetchRequest as FetchRequest
    from kvferry.session.events import HoldRequest as HoldRequest
    from kvferry.session.events import LeaseProgress as LeaseProgress
    from kvferry.session.events import LeaseRequest as LeaseRequest
    from kvferry.session.target.read_strategy import StagingPolicy as StagingPolicy
    from kvferry.session.timing import Timing as Timing
    from kvferry.staging.mover import Mover as Mover
    from kvferry.transport.base import Memory as Memory
    from kvferry.transport.selection.measurement import Measurement as Measurement
    from kvferry.transport.selection.measurement import Rates as Rates
    from kvferry.transport.shm.shared_memory import SharedMemory as SharedMemory
    from kvferry.transport.shm.shared_memory import allocate_shared as allocate_shared
    from kvferry.wire.messages import WIRE_VERSION as WIRE_VERSION
    from kvferry.wire.messages import FirstToken as FirstToken
    from kvferry.wire.messages import Reason as Reason
    from kvferry.wire.messages import Reference as Reference


_NAMES = {
    "agent.async_agent": ("AsyncAgent", "Released"),
    "agent.cache": ("Cache",),
    "agent.config": ("AgentConfig", "Notice", "new_epoch", "new_lease_id"),
    "agent.control.shared_token": ("SharedToken", "read_token"),
    "agent.loop.agent": ("Agent", "open_agent"),
    "agent.memory.arena": ("Arena",),
    "agent.transports.negotiation": ("PeerReport",),
    "plan.description.prompt": ("TOKEN_BYTES", "UNKNOWN_PROMPT", "UNNAMED", "Prompt", "PromptInput", "PromptName"),
    "plan.description.tokens": ("TokenRange",),
    "plan.digests.subject": ("DigestPolicy",),
    "plan.programs.copies": ("Direction",),
    "plan.strategy.strategies": ("Strategy",),
    "session.commands": (
        *("AgentStopped", "BlocksReleased", "FetchFailed", "FetchReport", "Fetched"),
        *("LeaseEnded", "LocateFailed", "Located", "RemoteEngine"),
    ),
    "session.events": (*("Ahead", "FetchRequest", "HoldRequest", "LeaseProgress", "LeaseRequest", "NOT_AHEAD"),),
    "session.target.read_strategy": ("StagingPolicy",),
    "session.timing": ("Timing",),
    "staging.mover": ("Mover",),
    "transport.base": ("Memory",),
    "transport.selection.measurement": ("Measurement", "Rates"),
    "transport.shm.shared_memory": ("SharedMemory", "allocate_shared"),
    "wire.messages": ("FirstToken", "Reason", "Reference", "WIRE_VERSION"),
}
_HOME = {name: f"{__name__}.{module}" for module, names in _NAMES.items() for name in names}

__all__ = ["__version__", *_HOME]


if not TYPE_CHECKING:  # Type checkers would take every name for one of ours.

    def __getattr__(name: str) -> Any:
        """Raises MissingExtraError, with the command that installs it, where a library is missing."""
        if name not in _HOME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        try:
            found = getattr(import_module(_HOME[name]), name)
        except ModuleNotFoundError as error:
            from kvferry.extras import missing_extra

            if said := missing_extra(error, "agent"):
                raise said from error
            raise
        globals()[name] = found
        return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
