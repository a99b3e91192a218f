"""Before UCX is loaded: gather the facts of this process, choose its settings, and put them into its environment.

The only place that reads and sets UCX's variables.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final
from urllib.parse import parse_qsl, urlencode

from kvferry.transport.machine.facts import Accelerator, Place, SystemFacts, UcxBuild
from kvferry.transport.machine.finding import Finding, Severity
from kvferry.transport.machine.hardware import accelerators, nics
from kvferry.transport.machine.process_limits import process_limits
from kvferry.transport.ucx.builds import build_at, build_to_load, installed_builds, loaded_directories
from kvferry.transport.ucx.settings import Environment, choose_environment

PACKAGES: Final = ("nixl_cu13", "nixl_cu12", "nixl")
"""NIXL's Python packages, in the order in which they are tried."""

QUIET: Final = {"UCX_LOG_LEVEL": "fatal", "NIXL_LOG_LEVEL": "FATAL"}

logger = logging.getLogger(__name__)

# What kvferry has set itself: it must not pass for the user's own when another engine prepares, in this process or in
# one that inherits the environment.
CHOSEN: Final = "KVFERRY_CHOSEN"
SILENCED: Final = "KVFERRY_SILENCED"


@dataclass(frozen=True, slots=True)
class Prepared:
    """What was found, what was chosen, and what cannot have any effect any more."""

    system: SystemFacts
    environment: Environment
    late: tuple[Finding, ...]


def system_facts(device: str = "cpu", buffer_device: str = "cpu", place: Place = Place.UNKNOWN) -> SystemFacts:
    """This machine and process, for an engine on `device` whose registered memory is `buffer_device`'s."""
    matching = [each for each in accelerators() if each.kind == device]
    return SystemFacts(
        device=device,
        buffer_device=buffer_device,
        place=place,
        nics=nics(),
        # Where there are several, only the engine knows which one is its own.
        accelerator=matching[0] if len(matching) == 1 else Accelerator("", device),
        build=_build(),
        limits=process_limits(),
        user=user_variables(),
    )


def prepare(device: str = "cpu", buffer_device: str = "cpu", place: Place = Place.UNKNOWN) -> Prepared:
    """Choose and set UCX's variables for this process; its own are left alone.

    Raises ConfigurationError when the user's own list of transports cannot work.
    """
    system = system_facts(device, buffer_device, place)
    environment = choose_environment(system)
    new = {name: value for name, value in environment.chosen.items() if os.environ.get(name) != value}
    late = _too_late(new) if loaded_directories() else ()
    kept = _forget_what_is_not_chosen(environment)
    os.environ.update(new)
    _note(CHOSEN, kept | new)
    for setting in environment.settings:
        logger.info("%s (%s): %s", setting, setting.origin, setting.reason)
    return Prepared(system, environment, late)


def silence_libraries() -> None:
    """Have UCX and NIXL write no messages of their own, unless the user has set how much they write. Before they are
    loaded; child processes inherit it."""
    new = {name: level for name, level in QUIET.items() if name not in os.environ}
    os.environ.update(new)
    _note(SILENCED, _noted(SILENCED) | new)


def user_variables() -> dict[str, str]:
    """UCX's variables in this process's environment that we have not put there."""
    return {name: value for name, value in os.environ.items() if _is_users(name, value)}


def _build() -> UcxBuild:
    loaded = loaded_directories()
    return build_at(loaded[0]) if loaded else build_to_load(installed_builds(), PACKAGES)


def _is_users(name: str, value: str) -> bool:
    return name.startswith("UCX_") and value not in (_noted(CHOSEN).get(name), _noted(SILENCED).get(name))


def _note(where: str, settings: Mapping[str, str]) -> None:
    os.environ[where] = urlencode(settings)


def _noted(where: str) -> dict[str, str]:
    return dict(parse_qsl(os.environ.get(where, "")))


def _forget_what_is_not_chosen(environment: Environment) -> dict[str, str]:
    """An engine before this one may have wanted what this one must not have. Returns what is left of our own."""
    ours = _noted(CHOSEN)
    for name in ours.keys() - environment.chosen.keys():
        if os.environ.get(name) == ours.pop(name):
            del os.environ[name]
    return ours


def _too_late(new: Mapping[str, str]) -> tuple[Finding, ...]:
    if not new:
        return ()
    values = " ".join(f"{name}={value}" for name, value in new.items())
    what = "UCX had been loaded before its settings were chosen, so these may have no effect"
    hint = f"set them where the process is started: {values}"
    return (Finding(Severity.WARNING, what, values, "set before anything loads NIXL", hint),)
