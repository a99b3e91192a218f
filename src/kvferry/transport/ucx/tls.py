"""UCX's lists of transports (`UCX_TLS`), and whether a NIXL agent can start with one.

An agent needs active messages from a transport that detects a dead peer. UCX's shared-memory transports have active
messages but detect nothing, and those that copy between processes or devices have no active messages.
"""

from __future__ import annotations

from typing import Final

from kvferry.errors import ConfigurationError

RC: Final = frozenset({"rc_verbs", "rc_mlx5"})
RDMA: Final = frozenset(
    {"rc", "rc_v", "rc_x", "ud", "ud_v", "ud_x", "ud_verbs", "ud_mlx5", "dc", "dc_x", "dc_mlx5", "srd", *RC}
)
IN_MODULES: Final = frozenset(
    {"cma", "cuda_copy", "cuda_ipc", "rocm_copy", "rocm_ipc", "srd", "ze_copy", "ze_ipc", "gdr_copy", *RC}
)
"""Transports that a build of UCX may have or not have, by the names of their modules."""
ACTIVE_MESSAGES: Final = frozenset({"tcp", "ib", *RDMA})
"""Transports and aliases with active messages that detect a dead peer."""
EVERYTHING: Final = ("", "all")


def names(value: str) -> tuple[str, ...]:
    """The names in a list, without the marks for exact names and for auxiliary use."""
    return tuple(word.strip().lstrip("^\\").lower() for word in value.split(",") if word.strip())


def has_active_messages(value: str) -> bool:
    """Whether a list leaves a transport that an agent can start with."""
    if value.strip() in EVERYTHING:
        return True
    if value.strip().startswith("^"):
        return not frozenset(names(value)).issuperset(("tcp", "ib"))
    return not frozenset(names(value)).isdisjoint({"all", *ACTIVE_MESSAGES})


def has_tcp(value: str) -> bool:
    """Whether UCX may use plain sockets with this list, and then listens on one."""
    listed = frozenset(names(value))
    if value.strip().startswith("^"):
        return "tcp" not in listed
    return value.strip() in EVERYTHING or not listed.isdisjoint({"all", "tcp"})


def check_transport_set(value: str) -> None:
    """Raises ConfigurationError for a list that UCX would only answer with an error of its backend."""
    if not has_active_messages(value):
        raise ConfigurationError(
            "NIXL's agent cannot start with these UCX transports: none of them has active messages"
            " and notices a dead peer",
            found=f"UCX_TLS={value}",
            expected="tcp, rc, ud or ib among them",
            hint="add tcp to UCX_TLS: it then only carries messages where another transport can carry the bytes"
            if not value.strip().startswith("^")
            else "do not leave out both tcp and ib",
        )
