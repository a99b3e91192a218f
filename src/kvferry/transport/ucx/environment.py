"""Choose UCX's settings and put them into the environment of this process, before UCX is loaded.

Only this module reads and sets UCX's variables.
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

# Variables that kvferry has set itself. They must not be taken for the user's when another engine chooses settings, in
# this process or in one that inherits the environment.
CHOSEN: Final = "KVFERRY_CHOSEN"
SILENCED: Final = "KVFERRY_SILENCED"


@dataclass(frozen=True, slots=True)
class Prepared:
    """The facts, the chosen settings, and findings about settings that come too late to have an effect."""

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
    kept = _unset_earlier_choices(environment)
    os.environ.update(new)
    _record(CHOSEN, kept | new)
    for setting in environment.settings:
        logger.info("%s (%s): %s", setting, setting.origin, setting.reason)
    return Prepared(system, environment, late)


def silence_libraries() -> None:
    """Turn off the log messages of UCX and NIXL, unless the user has set their log levels. To be called before they are
    loaded; child processes inherit it."""
    new = {name: level for name, level in QUIET.items() if name not in os.environ}
    os.environ.update(new)
    _record(SILENCED, _recorded(SILENCED) | new)


def user_variables() -> dict[str, str]:
    """UCX's variables in this process's environment that kvferry has not set."""
    return {name: value for name, value in os.environ.items() if _is_users(name, value)}


def _build() -> UcxBuild:
    loaded = loaded_directories()
    return build_at(loaded[0]) if loaded else build_to_load(installed_builds(), PACKAGES)


def _is_users(name: str, value: str) -> bool:
    return name.startswith("UCX_") and value not in (_recorded(CHOSEN).get(name), _recorded(SILENCED).get(name))


def _record(where: str, settings: Mapping[str, str]) -> None:
    os.environ[where] = urlencode(settings)


def _recorded(where: str) -> dict[str, str]:
    return dict(parse_qsl(os.environ.get(where, "")))


def _unset_earlier_choices(environment: Environment) -> dict[str, str]:
    """Unset what was chosen for an earlier engine and not for this one. Returns the earlier choices that remain."""
    earlier = _recorded(CHOSEN)
    for name in earlier.keys() - environment.chosen.keys():
        if os.environ.get(name) == earlier.pop(name):
            del os.environ[name]
    return earlier


def _too_late(new: Mapping[str, str]) -> tuple[Finding, ...]:
    if not new:
        return ()
    values = " ".join(f"{name}={value}" for name, value in new.items())
    what = "UCX had been loaded before its settings were chosen, so these may have no effect"
    hint = f"set them where the process is started: {values}"
    return (Finding(Severity.WARNING, what, values, "set before anything loads NIXL", hint),)
