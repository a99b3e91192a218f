"""Which memory transfers may use beside an engine's device: the table of (device, buffer device) pairs.

The device is where the engine computes, the buffer device what the memory that transports register belongs to. Equal
means that the engine's own blocks are registered; `cpu` that everything goes through staging memory in the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from importlib.metadata import entry_points

from kvferry.errors import ConfigurationError, FerryError, choice_named


class StagingMemory(StrEnum):
    """Where staging memory lies: the host's goes with every device, the device's keeps bytes off the host's memory."""

    HOST = "host"
    DEVICE = "device"


BUILT_IN = {
    "cpu": ("cpu",),
    "cuda": ("cuda", "cpu"),
    "rocm": ("rocm", "cpu"),
    "tpu": ("cpu",),
    "xpu": ("xpu", "cpu"),
}

GROUP = "kvferry.devices"
"""The entry point of devices that other packages bring: a function without arguments that calls `register_device`, and
where the device's own memory can be registered `kvferry.transport.memory_kind.register_kind`."""

_registered: dict[str, tuple[str, ...]] = {}


def devices() -> dict[str, tuple[str, ...]]:
    """Every known device and its buffer devices, the one that needs the fewest copies first."""
    return BUILT_IN | _registered


def torch_name(device: str) -> str:
    """What torch calls a kind of device: it has one name for those of NVIDIA and of AMD."""
    return "cuda" if device == "rocm" else device


def register_device(device: str, buffer_devices: Sequence[str]) -> None:
    """Make one more device known, with the buffer devices that work with it; the same again is fine.

    Raises ConfigurationError when a name is empty, no buffer device is given, one that is neither the device itself nor
    `cpu`, or when the device is known with others.
    """
    pairs = tuple(buffer_devices)
    if not device or not pairs or not set(pairs) <= {device, "cpu"} or len(set(pairs)) < len(pairs):
        raise ConfigurationError(
            "invalid registration of a device",
            found=f"{device!r}: {pairs}",
            expected="a name, and of that name and 'cpu' one or both",
        )
    known = devices().get(device, pairs)
    if known != pairs:
        raise ConfigurationError(
            f"device {device!r} is already registered",
            found=_listed(pairs),
            expected=_listed(known),
            hint="another name",
        )
    _registered[device] = pairs


def load_devices() -> tuple[str, ...]:
    """Make them known; their names. Doing it again is fine. Raises ConfigurationError naming the one that fails."""
    names = []
    for point in entry_points(group=GROUP):
        try:
            point.load()()
        except (ImportError, AttributeError, TypeError, FerryError) as error:
            raise ConfigurationError(
                f"the device {point.name!r} of another package cannot be loaded",
                found=f"{point.value}: {error}",
                expected=f"a function without arguments under the entry point {GROUP}",
                hint="update or uninstall that package",
            ) from error
        names.append(point.name)
    return tuple(names)


def check_pair(device: str, buffer_device: str) -> None:
    """Raises ConfigurationError when an engine on `device` cannot be served through memory of `buffer_device`."""
    known = devices()
    if device not in known:
        raise ConfigurationError(
            "unknown device",
            found=device,
            expected=_listed(sorted(known)),
            hint="a package can add others: entry points of the group kvferry.devices",
        )
    if buffer_device not in known[device]:
        raise ConfigurationError(
            f"a device {device!r} cannot use this buffer device",
            found=f"buffer device {buffer_device!r}",
            expected=_listed(known[device]),
            hint=f"set the buffer device to {known[device][0]!r}",
        )


def staging_memory_named(name: str) -> StagingMemory:
    """Raises ConfigurationError for another name."""
    return choice_named("staging memory", name, {memory.value: memory for memory in StagingMemory})


def check_staging(device: str, buffer_device: str, where: StagingMemory) -> None:
    """Raises ConfigurationError when staging memory of an engine on `device` cannot lie there: peers reach the
    device's only where transports register it."""
    if where is StagingMemory.DEVICE and (device == "cpu" or buffer_device != device):
        raise ConfigurationError(
            "staging memory can only lie on a device whose memory is registered",
            found=f"device {device!r}, buffer device {buffer_device!r}",
            expected="a device other than 'cpu' that is its own buffer device",
            hint="set staging_memory (--staging-memory) to 'host', or the buffer device to the engine's device",
        )


def _listed(names: Sequence[str]) -> str:
    return " or ".join(map(repr, names))
