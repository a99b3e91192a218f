"""Gathers and scatters on a device, beside the engine's own work."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import ExitStack
from typing import Protocol

from kvferry.errors import FerryError, IllegalEventError
from kvferry.plan.programs.tiles import Tile
from kvferry.staging.device.patterns import for_device
from kvferry.staging.mover import CLOSED, Moved
from kvferry.transport.registered_memory import Regions, View


class Launcher(Protocol):
    """Where copies of a device run; `SideStream` is the real one."""

    def launch(self, tiles: Sequence[Tile]) -> Callable[[], bool]:
        """Queue the copies of tiles that have at least one row each; what is returned tells whether all are done.

        Both may raise anything when the device or its compiler fails, and then none of these copies runs.
        """
        ...

    def finish(self) -> None:
        """Wait until nothing that was launched runs any more. Raises RuntimeError when the device fails, TimeoutError
        when that takes longer than copies do."""
        ...


class DeviceMover:
    """A `Mover` whose copies run on a device. Only `close` waits for it.

    `regions` are all memories that rows may touch, of the device and pinned ones of the host: a kernel that leaves them
    would end the engine's process. They must stay until `close`, which closes `pins` when no copy runs any more.
    """

    # A device does not call this process when its copies end.
    notifies = False
    # It reaches only host memory that is pinned for it.
    reaches_peer_memory = False

    def __init__(self, launcher: Launcher, regions: Regions, pins: Sequence[ExitStack] = ()) -> None:
        self._launcher = launcher
        self._regions = regions
        self._pins = tuple(pins)
        self._running: dict[Hashable, Callable[[], bool]] = {}
        self._ended: dict[Hashable, str] = {}
        self._is_closed = False

    @property
    def busy(self) -> bool:
        return bool(self._running or self._ended)

    def start(self, key: Hashable, tiles: Sequence[Tile], peer_view: View | None = None) -> None:
        """See `Mover`. The first of a kind of rows (how long, how aligned) is compiled, which takes up to a second."""
        if key in self._running or key in self._ended:
            raise IllegalEventError("a copy is started twice", found=f"{key}", expected="one copy per key at a time")
        try:
            self._launch(key, tiles)
        except FerryError as error:
            self._ended[key] = str(error)
        except Exception as error:  # noqa: BLE001 - compilers and drivers raise any type, which must end this key only
            self._ended[key] = _failed(error)

    def poll(self) -> list[Moved]:
        """See `Mover`."""
        ended, self._ended = self._ended, {}
        for key, is_done in self._running.items():
            try:
                if is_done():
                    ended[key] = ""
            except Exception as error:  # noqa: BLE001 - as above
                ended[key] = _failed(error)
        self._running = {key: is_done for key, is_done in self._running.items() if key not in ended}
        return [Moved(key, error) for key, error in ended.items()]

    def close(self) -> None:
        """See `Mover`. What runs on a device cannot be stopped, so it is waited for. Where it does not end in time, as
        on a device that hangs, what is pinned stays so; should it go on one day, blocks may be written after this."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            self._launcher.finish()
        except (RuntimeError, TimeoutError) as error:
            self._ended.update(dict.fromkeys(self._running, _failed(error)))
            self._running.clear()
            if isinstance(error, TimeoutError):
                return
        for pins in self._pins:
            pins.close()

    def _launch(self, key: Hashable, tiles: Sequence[Tile]) -> None:
        if self._is_closed:
            self._ended[key] = CLOSED
            return
        for tile in tiles:
            self._regions.check_tile(tile.source_start, tile.source_shift, tile.length, "this process (source)")
            self._regions.check_tile(tile.target_start, tile.target_shift, tile.length, "this process (target)")
        if short := for_device(tiles):
            self._running[key] = self._launcher.launch(short)
        else:
            self._ended[key] = ""


def _failed(error: Exception) -> str:
    words = str(error) if isinstance(error, RuntimeError | TimeoutError) else repr(error)
    return f"the device failed: {words}"
