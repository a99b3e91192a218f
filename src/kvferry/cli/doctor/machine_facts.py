"""What `kvferry doctor` knows of this machine before it tries anything: values, where each comes from, and findings."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Final

from kvferry import __version__, read_token
from kvferry.cli import environment
from kvferry.cli.engine_choice import SERVER_EXTRAS
from kvferry.cli.units import format_bytes
from kvferry.errors import FerryError
from kvferry.extras import EXTRAS, how_to_install, missing_modules
from kvferry.transport.machine.facts import UNKNOWN_NODE, UNLIMITED, Nic, SystemFacts
from kvferry.transport.machine.finding import Finding, Severity, finding_of
from kvferry.transport.machine.hardware import accelerators
from kvferry.transport.ucx.builds import installed_builds, loaded_directories
from kvferry.transport.ucx.settings import Environment

PACKAGES: Final = ("nixl", "nixl-cu12", "nixl-cu13", "torch", "numpy", "pyzmq", "transformers", "vllm")
NIXL: Final = ("nixl", "nixl-cu12", "nixl-cu13")
# What Docker gives a container that asks for nothing.
SMALL_SHM_BYTES: Final = 64 << 20
FOUND: Final = "found"
USED_BY: Final = {
    "agent": "transfers of every engine, doctor --peer",
    "native": "faster copies of short rows",
    "router": "route, top, bench, serve, up",
    "otel": "route --otel",
    "kubernetes": "route --kubernetes-selector",
    "ray": "up --on ray, serve run kvferry.ray:app",
    "simulate": "simulate",
    "jax": "engines with caches of JAX",
    "torch": "the engine, copies on devices",
    "kernels": "copies on devices",
    "engine": "serve and up with transformers",
}
# With these, everything but device kernels and tracing works.
MAIN: Final = ("agent", "router", "engine")


@dataclass(frozen=True, slots=True)
class Fact:
    """One value. `origin` says where it comes from: `default`, `environment`, `file`, `option`, `chosen` or `found`."""

    section: str
    name: str
    value: str
    origin: str = FOUND


def machine_facts(system: SystemFacts) -> Iterator[Fact]:
    """Versions, devices, cards and limits."""
    yield Fact("versions", "kvferry", __version__)
    yield Fact("versions", "python", f"{platform.python_version()} on {platform.system()} {platform.release()}")
    for name in PACKAGES:
        if found := _version(name):
            yield Fact("versions", name, found)
    yield from _extras()
    yield Fact("devices", "processors", f"{len(os.sched_getaffinity(0))} for this process, {os.cpu_count()} in all")
    devices = accelerators()
    for device in devices:
        yield Fact("devices", device.name, f"{device.kind}{_node(device.numa_node)}")
    if not devices:
        yield Fact("devices", "accelerators", "none on the PCI bus")
    for nic in system.nics:
        if nic.is_rdma or nic.is_up:
            yield Fact("network", nic.name, _nic_words(nic))
    if not any(nic.is_rdma for nic in system.nics):
        yield Fact("network", "RDMA", "no card in /sys/class/infiniband")
    yield from _limits(system)


def _extras() -> Iterator[Fact]:
    """Which parts of kvferry are installed here."""
    for extra in EXTRAS:
        missing = missing_modules(extra)
        value = f"not installed ({', '.join(missing)})" if missing else "installed"
        yield Fact("extras", extra, f"{value}; for {USED_BY[extra]}")


def _limits(system: SystemFacts) -> Iterator[Fact]:
    limits = system.limits
    locked = limits.locked_bytes
    yield Fact("limits", "locked memory", "unlimited" if locked == UNLIMITED else format_bytes(locked))
    yield Fact("limits", "/dev/shm", format_bytes(limits.shm_bytes))
    scope = f"kernel.yama.ptrace_scope = {limits.ptrace_scope}"
    capability = "with CAP_SYS_PTRACE" if limits.may_trace else "without CAP_SYS_PTRACE"
    yield Fact("limits", "reading other processes", f"{scope}, {capability}")
    spaces = f"pid namespace {limits.pid_namespace}, ipc namespace {limits.ipc_namespace}"
    yield Fact("limits", "container", f"{limits.container or 'none'}; {spaces}")


def ucx_facts(system: SystemFacts, ucx_version: str) -> Iterator[Fact]:
    """Every copy of UCX; the modules of the one that is loaded, or would be."""
    loaded = tuple(map(str, loaded_directories()))
    for build in installed_builds():
        state = f"loaded, version {ucx_version or 'unknown'}" if build.directory in loaded else "not loaded"
        yield Fact("ucx", build.owner, f"{build.directory} ({state})")
    if system.build.is_known:
        yield Fact("ucx", "transports in it", ", ".join(sorted(system.build.transports)))
    else:
        yield Fact("ucx", "copies", "none found")


def setting_facts(chosen: Environment | None, system: SystemFacts, token_file: str) -> Iterator[Fact]:
    """Settings of UCX, chosen or (where that was impossible) only the user's own, and of kvferry."""
    for setting in chosen.settings if chosen else ():
        yield Fact("settings", str(setting), setting.reason, str(setting.origin))
    for name, value in sorted(system.user.items()) if not chosen else ():
        yield Fact("settings", f"{name}={value}", "set by you", "environment")
    yield Fact("settings", "cache folder", _cache_folder(), environment.cache_origin())
    if token_file:
        yield Fact("settings", "token file", _tokens_in(token_file), environment.token_origin(token_file))
    else:
        yield Fact("settings", "token file", "none: engines accept peers on this host only", "default")


def _cache_folder() -> str:
    try:
        return str(environment.cache_directory())
    except FerryError as error:
        return f"none: {error}"


def _tokens_in(path: str) -> str:
    """The file, and how many tokens it holds. What is wrong with it is a finding."""
    with suppress(FerryError):
        return f"{path}: one token is used, {len(read_token(path).accepted)} more accepted"
    return path


def machine_findings(system: SystemFacts, token_file: str) -> Iterator[Finding]:
    """What is wrong with the machine whatever is tried on it. The choice of UCX's settings has findings of its own."""
    try:
        read_token(token_file)
    except FerryError as error:
        yield finding_of(error)
    if missing := [extra for extra in MAIN if missing_modules(extra)]:
        hint = how_to_install("engine" if "engine" in missing else ",".join(missing))
        if "engine" in missing:
            hint += " (for serve and up with transformers; not beside vLLM or SGLang, whose transformers it replaces)"
            hint += f"; beside these: {how_to_install(SERVER_EXTRAS)}" if len(missing) > 1 else ""
        yield Finding(Severity.NOTE, "parts of kvferry are not installed", ", ".join(missing), "", hint)
    yield from _copies()
    if not any(map(_version, NIXL)):
        hint = f"for RDMA and device memory: {how_to_install('nixl')}"
        yield Finding(Severity.NOTE, "NIXL is not installed; shm, cma and tcp work without", "no package", "", hint)
    shm = system.limits.shm_bytes
    if shm <= SMALL_SHM_BYTES:
        hint = "start the container with --shm-size=8g (Kubernetes: an emptyDir with medium Memory at /dev/shm)"
        what = "/dev/shm is small: vLLM and torch put what their processes share there (kvferry does not)"
        yield Finding(Severity.NOTE, what, format_bytes(shm), "some GiB", hint)


def _copies() -> Iterator[Finding]:
    installed, loaded = installed_builds(), loaded_directories()
    if len(loaded) > 1:
        what = "several copies of UCX are loaded into one process: they do not share their state"
        hint = "keep one NIXL package and pip uninstall the others"
        yield Finding(Severity.WARNING, what, ", ".join(map(str, loaded)), "one", hint)
    elif len(installed) > 1:
        what = "there are several copies of UCX; which one an engine loads depends on what it imports first"
        found = ", ".join(build.directory for build in installed)
        hint = "keep one NIXL package (pip uninstall the others); kvferry takes nixl_cu13, then nixl_cu12, then nixl"
        yield Finding(Severity.NOTE, what, found, "one", hint)


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _nic_words(nic: Nic) -> str:
    speed = f", {nic.gigabits_per_s:g} Gbit/s" if nic.gigabits_per_s else ""
    return f"{nic.kind}, {nic.state if nic.state != 'unknown' else 'up'}{speed}{_node(nic.numa_node)}"


def _node(number: int) -> str:
    return f", memory node {number}" if number != UNKNOWN_NODE else ""
