"""The only owner of threads and sockets of the transfer: feeds sessions with events and does what they command."""

from kvferry.agent.agent import Agent, AgentConfig, Host, Notice

__all__ = ["Agent", "AgentConfig", "Host", "Notice"]
