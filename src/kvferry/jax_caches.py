"""Caches that are arrays of JAX, on a TPU or wherever JAX runs: compiled programs copy into and out of staging memory.

An engine describes each rank with `kvferry.layout.describe(…, FIRST_ADDRESS)`: one region for each array, of which the
rank's device has a piece. Its steps donate the arrays inside `JaxCaches.turn`, and leave there what they return.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial

from kvferry.extras import missing_extra

try:
    import jax
except ModuleNotFoundError as error:
    raise (missing_extra(error, "jax") or error) from error

from kvferry.agent.cache import Cache
from kvferry.plan.description.layout import Layout
from kvferry.staging.device.table import check_pair, load_devices
from kvferry.staging.jax_arrays.copies import ArrayCopies
from kvferry.staging.jax_arrays.held_arrays import FIRST_ADDRESS, HeldArrays, Turn
from kvferry.staging.thread_mover import ThreadMover
from kvferry.transport.base import Memory
from kvferry.transport.memory_kind import HOST

__all__ = ["FIRST_ADDRESS", "JaxCaches", "Turn"]

# One copy waits for the device while another one is at work in the host's memory.
NUM_THREADS = 2


class JaxCaches:
    """The arrays of one engine, whose ranks are devices of this process: those of the arrays' mesh, in the order of
    what they have of an array.

    The engine and transfers use the arrays in turn. All programs that copy are compiled in the beginning.
    """

    def __init__(self, arrays: Sequence[jax.Array], layouts: Sequence[Layout]) -> None:
        """Compile the programs, which takes a second or more for each kind of array and device.

        Raises ConfigurationError when the arrays are not the regions of the layouts, or not all on devices of this
        process; TransportError when the device's compiler fails.
        """
        self._held = HeldArrays(arrays, layouts)
        self._layouts = tuple(map(_far, layouts))
        self._held.prepare()

    @property
    def num_compiled(self) -> int:
        """How many programs were compiled; it does not grow while caches are moved."""
        return self._held.programs.num_compiled

    def turn(self) -> AbstractContextManager[Turn]:
        """The turn in which the engine begins a step: `with caches.turn() as turn: turn.arrays = step(turn.arrays)`.

        Copies of transfers are begun before or after it, never within, and ordered by what JAX knows of its arrays: the
        step waits for none here, and must not wait for its own end.
        """
        return self._held.turn()

    def cache(self, rank: int) -> Cache:
        """How the agent of a rank gets at its pieces. Raises ConfigurationError for a platform of JAX that is no known
        device (entry point `kvferry.devices`)."""
        (device,) = self._held.kinds[rank][0].where.device_set
        name = device_name(device)
        load_devices()
        check_pair(name, HOST)
        return Cache(self._layouts, (), partial(self._mover, rank), device=name, buffer_device=HOST)

    def _mover(self, rank: int, near: Sequence[Memory], notify: Callable[[], None]) -> ThreadMover:
        return ThreadMover(ArrayCopies(self._held, rank, self._layouts[rank], near), notify, NUM_THREADS)


def device_name(device: jax.Device) -> str:
    """What kvferry calls a device: JAX has one name for the GPUs of two makers."""
    if device.platform != "gpu":
        return str(device.platform)
    return "rocm" if "rocm" in device.client.platform_version else "cuda"


def _far(layout: Layout) -> Layout:
    """The layout with its regions marked as memory that the processor does not read: no digest is made of them."""
    return replace(layout, regions=tuple(replace(region, kind="vram") for region in layout.regions))
