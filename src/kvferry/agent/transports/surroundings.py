"""What this process's own surroundings let one expect of a transport."""

from __future__ import annotations

from kvferry.transport.machine.nics import nics
from kvferry.transport.machine.preparation import users_settings
from kvferry.transport.machine.process_limits import confinement
from kvferry.transport.process_identity import host_here
from kvferry.transport.selection.expectation import Surroundings


def surroundings_here(requested: str, may_turn: bool = True) -> Surroundings:
    """Of this host, for an engine with the transport `requested`, and whether it lets its sources write instead."""
    return Surroundings(
        host=host_here(),
        has_rdma=any(nic.is_rdma and nic.is_up for nic in nics()),
        requested=requested,
        user_transports=users_settings().get("UCX_TLS", ""),
        may_attach=confinement().may_attach,
        may_turn=may_turn,
    )
