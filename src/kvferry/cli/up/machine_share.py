"""What each engine of a fleet gets of the one machine that they share: devices of its own, or a part of its memory.

Engines take all that they find: vLLM nine tenths of the first device's memory, or of the host's where there is none. So
the second one would not start.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from kvferry.cli.options import passed_options
from kvferry.errors import ConfigurationError
from kvferry.transport.machine.hardware import ROOT
from kvferry.transport.machine.host_memory import host_memory

# Where users say themselves how much memory a server may take.
MEMORY_OPTIONS: Final = ("--gpu-memory-utilization", "--kv-cache-memory-bytes", "--mem-fraction-static")
MEMORY_VARIABLE: Final = "VLLM_CPU_KVCACHE_SPACE"
# How many devices a server takes is the product of these.
PARALLEL_OPTIONS: Final = (
    ("--tensor-parallel-size", "-tp", "--tp-size", "--tp"),
    ("--pipeline-parallel-size", "-pp", "--pp-size"),
    ("--prefill-context-parallel-size", "-pcp"),
    ("--data-parallel-size", "-dp", "--dp-size", "--dp"),
)
# Whoever writes these has chosen devices, or has options where they are not seen.
OWN_CHOICE: Final = ("--config", "--device", "--base-gpu-id")
VARIABLES: Final = {
    "cuda": ("CUDA_VISIBLE_DEVICES",),
    "rocm": ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"),
    "xpu": ("ZE_AFFINITY_MASK",),
}
"""What says to a process which devices it may use; where there are two, both must say the same."""
HINTS: Final = {
    "vllm": "-- --gpu-memory-utilization 0.4 --kv-cache-memory-bytes 1073741824",
    "sglang": "-- --mem-fraction-static 0.4",
}
# What is left to whatever else runs here, and to the moment when weights are read.
USED_MEMORY: Final = 0.8


@dataclass(frozen=True, slots=True)
class Share:
    """What one engine gets: variables of its process, words of its command line, and the same as text for people."""

    environment: Mapping[str, str] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()
    words: str = ""


@dataclass(frozen=True, slots=True)
class Machine:
    """The devices that processes may use here, as `VARIABLES[kind]` names them, and the part of the host's memory that
    nobody uses."""

    kind: str = "cpu"
    devices: tuple[str, ...] = ()
    free_memory: float = 1.0


def shares(
    machine: Machine, engine: str, num_engines: int, arguments: Sequence[str], is_limited: bool
) -> tuple[Share, ...]:
    """A share for each engine, whose own options are `arguments`. `is_limited`: a variable says how much of the host's
    memory they take. Where the options choose devices, nothing is added.

    Raises ConfigurationError when there are not devices enough, and nothing says how to share one.
    """
    options = passed_options(arguments)
    if options.keys() & set(OWN_CHOICE):
        return (Share(),) * num_engines
    num_each, is_said = _devices_of(options), bool(options.keys() & set(MEMORY_OPTIONS))
    if machine.devices:
        return _of_devices(machine, engine, num_engines, num_each, is_said)
    if engine != "vllm" or is_said or is_limited:
        return (Share(),) * num_engines
    # vLLM's name for the part of the host's memory, or of the container's, that one worker takes.
    part = int(100 * USED_MEMORY * machine.free_memory / (num_engines * num_each)) / 100
    if not part:
        raise ConfigurationError(
            "there is too little memory for so many engines",
            found=f"{machine.free_memory:.0%} of it is free, for {num_engines} engines of {num_each} workers",
            hint="start fewer, or say what each takes: -- --kv-cache-memory-bytes 1073741824",
        )
    found = Share(
        arguments=("--gpu-memory-utilization", f"{part:.2f}"), words=f"takes at most {part:.0%} of the memory"
    )
    return (found,) * num_engines


def free_memory(root: Path = ROOT) -> float:
    """The part of this host's memory, or of its container's, that is free; 1 where the system does not say. `root` is
    for tests."""
    found = host_memory(root)
    return found.available / found.total if found.total else 1.0


def machine_here(variables: Mapping[str, str]) -> Machine:
    """The machine as the installed torch reaches it: engines use the same torch."""
    import torch

    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None:
        return Machine(free_memory=free_memory())
    kind = "rocm" if found.type == "cuda" and torch.version.hip else found.type
    count = torch.accelerator.device_count()
    value = next(filter(None, (variables.get(name) for name in VARIABLES.get(kind, ()))), "")
    named = tuple(filter(None, map(str.strip, value.split(","))))
    # A process sees the devices named before the first that is not there, and only one part of a device (MIG).
    if named and all(name.startswith("MIG-") for name in named):
        return Machine(kind, named)
    return Machine(kind, named[:count] or tuple(map(str, range(count))))


def _of_devices(machine: Machine, engine: str, num_engines: int, num_each: int, is_limited: bool) -> tuple[Share, ...]:
    num_devices, variables = len(machine.devices), VARIABLES.get(machine.kind, ())
    is_enough = num_engines * num_each <= num_devices
    if not is_enough and not is_limited and engine != "transformers":
        raise ConfigurationError(
            "the engines need a device each",
            found=f"{machine.kind} devices: {num_devices}, for {num_engines} engines that take {num_each} each",
            expected=f"{num_engines * num_each} devices, or how much memory of one each engine may take",
            hint=HINTS[engine],
        )
    if not variables or num_each > num_devices:
        return (Share(),) * num_engines
    found = []
    for number in range(num_engines):
        first = number * num_each if is_enough else number * num_each % (num_devices - num_each + 1)
        own = ",".join(machine.devices[first : first + num_each])
        found.append(Share(dict.fromkeys(variables, own), words=f"uses {machine.kind} device {own}"))
    return tuple(found)


def _devices_of(options: Mapping[str, str]) -> int:
    """How many devices one server takes."""
    number = 1
    for names in PARALLEL_OPTIONS:
        if "--data-parallel-size" in names and "--enable-dp-attention" in options:
            continue
        values = [int(options[name]) for name in names if options.get(name, "").isdecimal()]
        number *= max(values, default=1)
    return max(1, number)
