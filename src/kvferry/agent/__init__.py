"""The only owner of threads and sockets of the transfer: feeds sessions with events and does what they command."""

from kvferry.agent.agent import Agent, AgentConfig, Host, Notice, new_epoch, new_lease_id

__all__ = ["Agent", "AgentConfig", "Host", "Notice", "new_epoch", "new_lease_id"]
