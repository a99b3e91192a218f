"""What each engine of a fleet gets of the one machine that they share: devices of its own, or a part of its memory.

Engines take all that they find: vLLM nine tenths of the first device's memory, or of the host's where there is none. So
the second one would not start.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Final

from kvferry.errors import ConfigurationError

# Where users say themselves how much memory a server may take.
MEMORY_OPTIONS: Final = ("--gpu-memory-utilization", "--kv-cache-memory-bytes", "--mem-fraction-static")
MEMORY_VARIABLE: Final = "VLLM_CPU_KVCACHE_SPACE"
# Of how many devices a server is: the product of these.
PARALLEL_OPTIONS: Final = (
    ("--tensor-parallel-size", "-tp", "--tp-size", "--tp"),
    ("--pipeline-parallel-size", "-pp", "--pp-size"),
    ("--data-parallel-size", "-dp", "--dp-size", "--dp"),
)
VARIABLES: Final = {"cuda": "CUDA_VISIBLE_DEVICES", "rocm": "HIP_VISIBLE_DEVICES", "xpu": "ZE_AFFINITY_MASK"}
"""What says to a process which devices it may use."""
# What is left to whatever else runs here, and to the moment when weights are read.
USED_MEMORY: Final = 0.8


@dataclass(frozen=True, slots=True)
class Share:
    """Of one engine: variables of its process, words of its command line, and the same for people."""

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
    """One for each engine, whose own options are `arguments`. `is_limited`: a variable says how much memory they take.

    Raises ConfigurationError when there are not devices enough, and nothing says how to share one.
    """
    num_each = _devices_of(arguments)
    is_limited = is_limited or any(word.partition("=")[0] in MEMORY_OPTIONS for word in arguments)
    if machine.devices:
        return _of_devices(machine, engine, num_engines, num_each, is_limited)
    if engine != "vllm" or is_limited:
        return (Share(),) * num_engines
    # vLLM's name for the part of the host's memory that one worker takes.
    part = f"{int(100 * USED_MEMORY * machine.free_memory / (num_engines * num_each)) / 100:.2f}"
    words = f"takes at most {float(part):.0%} of this host's memory"
    return (Share(arguments=("--gpu-memory-utilization", part), words=words),) * num_engines


def free_memory(meminfo: str) -> float:
    """The part of the host's memory that is available, of the text in /proc/meminfo; 1 where it does not say."""
    lines = [line.split() for line in meminfo.splitlines()]
    sizes = {words[0]: int(words[1]) for words in lines if len(words) > 1 and words[1].isdecimal()}
    total, available = sizes.get("MemTotal:", 0), sizes.get("MemAvailable:", 0)
    return available / total if total and available else 1.0


def machine_here(variables: Mapping[str, str], meminfo: Path = Path("/proc/meminfo")) -> Machine:
    """As the installed torch reaches it, which is that of the engines."""
    import torch

    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None:
        return Machine(free_memory=free_memory(meminfo.read_text(encoding="ascii")))
    kind = "rocm" if found.type == "cuda" and torch.version.hip else found.type
    numbers = tuple(map(str, range(torch.accelerator.device_count())))
    named = tuple(filter(None, variables.get(VARIABLES.get(kind, ""), "").split(",")))
    return Machine(kind, named if len(named) == len(numbers) else numbers)


def _of_devices(machine: Machine, engine: str, num_engines: int, num_each: int, is_limited: bool) -> tuple[Share, ...]:
    num_devices, variable = len(machine.devices), VARIABLES.get(machine.kind)
    is_enough = num_engines * num_each <= num_devices
    if not is_enough and not is_limited and engine != "transformers":
        raise ConfigurationError(
            "the engines need a device each",
            found=f"{machine.kind} devices: {num_devices}, for {num_engines} engines that take {num_each} each",
            expected=f"{num_engines * num_each} devices, or how much memory of one each engine may take",
            hint="-- --gpu-memory-utilization 0.4 --kv-cache-memory-bytes 1073741824",
        )
    if variable is None or num_each > num_devices:
        return (Share(),) * num_engines
    found = []
    for number in range(num_engines):
        first = number * num_each if is_enough else number * num_each % (num_devices - num_each + 1)
        own = ",".join(machine.devices[first : first + num_each])
        found.append(Share({variable: own}, words=f"uses {machine.kind} device {own}"))
    return tuple(found)


def _devices_of(arguments: Sequence[str]) -> int:
    """How many devices one server takes, as its options say."""
    number = 1
    for names in PARALLEL_OPTIONS:
        if names[0].startswith("--data") and "--enable-dp-attention" in arguments:
            continue
        number *= max(map(int, filter(str.isdecimal, _values(names, arguments))), default=1)
    return max(1, number)


def _values(names: Sequence[str], arguments: Sequence[str]) -> list[str]:
    joined = [word.partition("=")[2] for word in arguments if word.partition("=")[0] in names]
    return joined + [value for word, value in pairwise(arguments) if word in names]
