"""Devices that other packages bring: functions without arguments under the entry point `kvferry.devices`.

Such a function calls `kvferry.staging.device.table.register_device`, and where the device's own memory can be
registered `kvferry.transport.memory_kind.register_kind`.
"""

from __future__ import annotations

from importlib.metadata import entry_points

from kvferry.errors import ConfigurationError, FerryError

GROUP = "kvferry.devices"


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
