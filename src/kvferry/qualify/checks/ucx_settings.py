"""Which transports UCX is told to use for memory of the device, and whether sets that cannot work are refused.

On a machine with Intel GPUs and no RDMA this is the case of one node: `ze_ipc,ze_copy,tcp` is chosen; `ze_copy,cma` and
`ze_ipc,ze_copy,sm` have nothing that carries NIXL's messages, and UCX would only say that its backend has failed.
"""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from typing import Final

from kvferry.errors import ConfigurationError
from kvferry.qualify.outcome import Outcome, failed, passed, skipped
from kvferry.transport.machine.facts import SystemFacts
from kvferry.transport.machine.finding import Severity
from kvferry.transport.ucx.checks import COPIES, SHARES
from kvferry.transport.ucx.environment import PACKAGES, system_facts
from kvferry.transport.ucx.settings import TRANSPORTS, choose_environment

NAME: Final = "UCX settings"
NOT_REACHED: Final = "no UCX here reaches {kind} memory: caches go through memory of the host (docs/transports.md)"


def run(kind: str) -> Outcome:
    """Check the settings of this machine, for an engine on a device of that kind."""
    return check(system_facts(kind, kind))


def check(system: SystemFacts) -> Outcome:
    """Check what is chosen where the user has set nothing, with the reason, and what is refused."""
    kind = system.device
    if kind not in COPIES:
        return skipped(NAME, f"memory of {kind} devices is not registered with UCX")
    if not reaches_device(system):
        return skipped(NAME, NOT_REACHED.format(kind=kind))
    chosen = choose_environment(replace(system, user={}))
    errors = [str(each) for each in chosen.warnings if each.severity is Severity.ERROR]
    if errors:
        return failed(NAME, "; ".join(errors))
    setting = next(each for each in chosen.settings if each.name == TRANSPORTS)
    facts = [(str(setting), setting.reason)]
    for wrong in wrong_sets(kind):
        try:
            choose_environment(replace(system, user={TRANSPORTS: wrong}))
        except ConfigurationError as error:
            facts.append((f"{TRANSPORTS}={wrong} is refused", error.what))
        else:
            return failed(NAME, f"{TRANSPORTS}={wrong} is not refused, though nothing in it carries messages")
    return passed(NAME, f"{setting}; {len(facts) - 1} sets that cannot work are refused", facts=tuple(facts))


def reaches_device(system: SystemFacts) -> bool:
    """Whether UCX is here, and has what it takes to register memory of the device."""
    return system.build.is_known and COPIES.get(system.device, "") in system.build.transports


def has_nixl() -> bool:
    """Whether one of NIXL's packages is installed here."""
    return any(find_spec(package) for package in PACKAGES)


def wrong_sets(kind: str) -> tuple[str, ...]:
    """Sets without a transport that carries messages, which people have tried."""
    return f"{COPIES[kind]},cma", f"{SHARES[kind]},{COPIES[kind]},sm"
