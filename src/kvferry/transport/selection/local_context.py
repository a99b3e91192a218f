"""What this process can expect of a transport to a peer: its host, its rights, and what its user has set."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.transport.machine.facts import Place
from kvferry.transport.machine.hardware import nics
from kvferry.transport.machine.process_limits import process_limits
from kvferry.transport.process_identity import host_here
from kvferry.transport.ucx.environment import user_variables


@dataclass(frozen=True, slots=True)
class LocalContext:
    """Of this process: the host's name (empty: not known), whether an RDMA port is up, and the transport asked for.

    `user_transports` is the user's own UCX_TLS, `may_attach` whether the kernel lets processes read each other, and
    `may_turn` whether a peer that can only be read far slower than written to is asked to write.
    """

    host: str = ""
    has_rdma: bool = False
    requested: str = "auto"
    user_transports: str = ""
    may_attach: bool = True
    may_turn: bool = False

    def place_of(self, host: str) -> Place:
        """Where a peer is that says it runs on `host`."""
        if not self.host or not host:
            return Place.UNKNOWN
        return Place.SAME_HOST if host == self.host else Place.OTHER_HOST


def local_context(requested: str, may_turn: bool = True) -> LocalContext:
    """That of an engine with the transport `requested`; `may_turn` is whether it lets its sources write instead."""
    return LocalContext(
        host=host_here(),
        has_rdma=any(nic.is_rdma and nic.is_up for nic in nics()),
        requested=requested,
        user_transports=user_variables().get("UCX_TLS", ""),
        may_attach=process_limits().may_attach,
        may_turn=may_turn,
    )
