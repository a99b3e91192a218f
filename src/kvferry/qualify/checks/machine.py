"""What the machine is: versions, devices, how they reach one another, and limits. Nothing that names it."""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

import torch

from kvferry.qualify.expected import GPUS
from kvferry.qualify.outcome import Outcome, Result, passed
from kvferry.qualify.torch_device import TorchDevice, number_of
from kvferry.transport.machine.facts import UNKNOWN_NODE, UNLIMITED, SystemFacts
from kvferry.transport.machine.hardware import accelerators
from kvferry.transport.ucx.environment import system_facts

NAME: Final = "machine"
PACKAGES: Final = (
    *(
        "kvferry",
        "torch",
        "triton",
        "pytorch-triton-rocm",
        "pytorch-triton-xpu",
        "jax",
        "nixl-cu12",
        "nixl-cu13",
        "nixl",
    ),
    *("transformers", "numpy"),
)

Fact = tuple[str, str]


def run(kind: str) -> Outcome:
    """Whether the libraries see the devices that are in the machine."""
    system = system_facts(kind, kind)
    facts = (*_versions(), *_devices(kind), *_host(system))
    if kind in GPUS and not number_of(kind):
        on_bus = sum(each.kind == kind for each in accelerators())
        words = f"torch {torch.__version__} sees no {kind} device; on the PCI bus there are {on_bus}"
        hint = "install the driver and a torch that was built for it"
        return Outcome(NAME, Result.FAILED, f"{words}: {hint}", facts=facts)
    unreached = sorted({each.kind for each in accelerators()}) if kind == "cpu" else []
    only = f", though there are {', '.join(unreached)} devices on the PCI bus: this torch does not reach them"
    words = {
        "cpu": f"no accelerator is checked, only host memory{only if unreached else ''}",
        "tpu": "a TPU, which JAX reaches and torch does not",
    }.get(kind, "")
    return passed(NAME, words or f"{number_of(kind)} x {TorchDevice(kind).name}", facts=facts)


def _versions() -> Iterator[Fact]:
    yield "python", platform.python_version()
    yield "system", f"{platform.system()} {platform.release()} on {platform.machine()}"
    for name in PACKAGES:
        try:
            yield name, version(name)
        except PackageNotFoundError:
            continue
    for name in ("cuda", "hip", "xpu"):
        if found := getattr(torch.version, name, None):
            yield f"torch was built for {name}", str(found)


def _devices(kind: str) -> Iterator[Fact]:
    counts = Counter(each.kind for each in accelerators())
    yield "accelerators on the PCI bus", ", ".join(f"{number} {name}" for name, number in counts.items()) or "none"
    if kind not in GPUS:
        return
    found = [TorchDevice(kind, number) for number in range(number_of(kind))]
    for number, device in enumerate(found):
        module: Any = torch.get_device_module(device.torch)
        total = module.get_device_properties(device.torch).total_memory
        yield f"device {number}", f"{device.name}, {total / 2**30:.0f} GiB"
    if kind != "xpu" and len(found) > 1:
        pairs = [(a, b) for a in range(len(found)) for b in range(len(found)) if a != b]
        near = sum(torch.cuda.can_device_access_peer(a, b) for a, b in pairs)
        yield "pairs of devices that reach each other's memory", f"{near} of {len(pairs)}"


def _host(system: SystemFacts) -> Iterator[Fact]:
    nodes = {each.numa_node for each in accelerators()} - {UNKNOWN_NODE}
    yield "memory nodes of accelerators", ", ".join(map(str, sorted(nodes))) or "unknown"
    rdma = Counter(f"{nic.kind} {nic.gigabits_per_s:g} Gbit/s {nic.state}" for nic in system.nics if nic.is_rdma)
    yield "RDMA ports", ", ".join(f"{number} x {name}" for name, number in rdma.items()) or "none"
    limits = system.limits
    locked = "unlimited" if limits.locked_bytes == UNLIMITED else f"{limits.locked_bytes >> 20:,} MiB"
    yield "locked memory", locked
    yield "may read other processes", "yes" if limits.may_attach else "no"
    yield "container", limits.container or "none"
    build = system.build
    yield "UCX", f"{build.owner}: {', '.join(sorted(build.transports))}" if build.is_known else "none found"
