"""An engine whose cache is arrays of JAX, one for each region, with the heads over the devices of a mesh."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from engines import oracle
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kvferry import Cache
from kvferry.jax_caches import FIRST_ADDRESS, JaxCaches
from kvferry.layout import CacheModel, EngineShape, describe
from kvferry.staging.jax_arrays.programs import BITS


@partial(jax.jit, donate_argnums=0)
def rewritten(arrays: tuple[jax.Array, ...], block: jax.Array) -> tuple[jax.Array, ...]:
    """A step of the engine's: it reads one block of each array, and writes that again. As integers: XLA's CPU platform
    changes all NaNs of an array when it writes to a part of it."""

    def again(array: jax.Array) -> jax.Array:
        bits = jax.lax.bitcast_convert_type(array, BITS[array.dtype.itemsize])
        bits = bits.at[block].set(jnp.take(bits, block, axis=0))
        return jax.lax.bitcast_convert_type(bits, array.dtype)

    return tuple(map(again, arrays))


@partial(jax.jit, donate_argnums=0)
def written(arrays: tuple[jax.Array, ...], block: jax.Array, value: jax.Array) -> tuple[jax.Array, ...]:
    """A step of the engine's: it writes one block of each array."""
    return tuple(array.at[block].set(value.astype(array.dtype)) for array in arrays)


class JaxEngine:
    """`pictures` are what the host knows of each rank's memory, for the oracle."""

    def __init__(self, model: CacheModel, shape: EngineShape, dtype: Any) -> None:
        self.layouts = describe(model, shape, FIRST_ADDRESS)
        self.pictures = [oracle.Memory.poisoned(layout) for layout in self.layouts]
        self._dtype, self._heads_axis = np.dtype(dtype), 1 if shape.format == "head-major" else 2
        self._block_tokens = shape.block_tokens
        names = [None, None, None, None]
        names[self._heads_axis] = "heads"
        heads, dim = (axis.extent for axis in self.layouts[0].states[0].axes)
        # Where there are more devices than heads, several have the same.
        self._num_parts = min(heads, shape.tensor_parallel)
        devices = np.array(jax.devices()[: shape.tensor_parallel]).reshape(self._num_parts, -1)
        mesh = Mesh(devices, ("heads", "replicas"))
        self._sharding = NamedSharding(mesh, PartitionSpec(*names))
        inner = (heads, shape.block_tokens) if shape.format == "head-major" else (shape.block_tokens, heads)
        self._shape = (shape.num_blocks, *inner, dim)
        self.caches = JaxCaches(self._arrays(), self.layouts)

    def cache(self, rank: int) -> Cache:
        return self.caches.cache(rank)

    def close(self) -> None:
        """Nothing is left."""

    def read(self, number: int, table: Sequence[int], num_tokens: int) -> np.ndarray:
        """What the engine's attention would read of a state: bytes by token, head and dim."""
        blocks, slots = np.divmod(np.arange(num_tokens), self._block_tokens)
        where = np.array(table)[blocks], slots
        with self.caches.turn() as turn:
            array = jax.lax.bitcast_convert_type(turn.arrays[number], BITS[self._dtype.itemsize])
            found = array[where[0], :, where[1]] if self._heads_axis == 1 else array[where]
        return np.asarray(found).view(np.uint8)

    def upload(self) -> None:
        """Let the arrays have what the pictures show."""
        with self.caches.turn() as turn:
            turn.arrays = self._arrays()

    def step(self, block: int, value: float) -> None:
        with self.caches.turn() as turn:
            turn.arrays = written(turn.arrays, jnp.int32(block), jnp.float32(value))

    def rewrite(self, block: int) -> None:
        """A step that changes nothing, but all arrays are new ones after it."""
        with self.caches.turn() as turn:
            turn.arrays = rewritten(turn.arrays, jnp.int32(block))

    def download(self) -> None:
        """Let the pictures show what the arrays have."""
        with self.caches.turn() as turn:
            for number, array in enumerate(turn.arrays):
                for rank, piece in enumerate(self._pieces(array)):
                    self._picture(rank, number)[:] = np.asarray(piece).reshape(-1).view(np.uint8)

    def _picture(self, rank: int, number: int) -> np.ndarray:
        return self.pictures[rank].buffers[self.layouts[rank].regions[number].address]

    def _pieces(self, array: jax.Array) -> list[jax.Array]:
        first = sorted(array.addressable_shards, key=lambda shard: shard.index[self._heads_axis].start or 0)
        return [shard.data for shard in first]

    def _arrays(self) -> tuple[jax.Array, ...]:
        local = list(self._shape)
        local[self._heads_axis] //= self._num_parts
        return tuple(self._array(number, local) for number in range(len(self.layouts[0].regions)))

    def _array(self, number: int, local: list[int]) -> jax.Array:
        pieces = [
            jax.device_put(self._picture(rank, number).copy().view(self._dtype).reshape(local), jax.devices()[rank])
            for rank in range(len(self.layouts))
        ]
        return jax.make_array_from_single_device_arrays(self._shape, self._sharding, pieces)
