"""The only owner of threads and sockets of the transfer: feeds sessions with events and does what they command."""

from kvferry.agent.agent import Agent
from kvferry.agent.config import STAGING_BYTES, AgentConfig, Host, Notice, new_epoch, new_lease_id, staging_named
from kvferry.agent.shared_token import NO_TOKEN, SharedToken, read_token

__all__ = [
    "NO_TOKEN",
    "STAGING_BYTES",
    "Agent",
    "AgentConfig",
    "Host",
    "Notice",
    "SharedToken",
    "new_epoch",
    "new_lease_id",
    "read_token",
    "staging_named",
]
