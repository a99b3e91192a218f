"""The description of tpu-inference's arrays, against what makes these arrays there and what writes tokens into them."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
from engine_server import is_installed

if not is_installed("tpu_inference"):
    pytest.skip("tpu-inference is not installed: see make test-vllm-tpu", allow_module_level=True)

import jax
import numpy as np
from engines import oracle
from jax.sharding import Mesh
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec

from kvferry.connectors.vllm_tpu.description import Arrays, describe_ranks
from kvferry.errors import LayoutError
from kvferry.layout import EngineShape, TokenRange, describe
from kvferry.plan.description.model import attention
from kvferry.plan.programs.program import bind
from kvferry.plan.programs.request import copies_for
from kvferry.plan.routing.route import route
from kvferry.testing.elements import value_of

LAYERS = ["layer.0", "layer.1"]
BLOCK_TOKENS, NUM_BLOCKS, NUM_TOKENS = 4, 6, 10
TABLE = [4, 1, 3]
OTHER_SHAPE = EngineShape(2, 1, 3, 8, "head-major")
OTHER_TABLE = [7, 0, 5, 2]
TOKENS = TokenRange(0, NUM_TOKENS)
# Heads, dims and devices: padded to 128, as wide as they are, wider, and the one size with a kernel of its own; with
# more devices than heads; and an odd number of heads, for which rows are filled up where several are packed.
GEOMETRIES = pytest.mark.parametrize(
    ("heads", "dim", "devices"), [(4, 32, 2), (2, 128, 1), (2, 160, 2), (4, 64, 2), (2, 64, 4), (3, 64, 1), (1, 16, 2)]
)
DTYPES = pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])


def arrays_of(heads, dim, devices, dtype, spec=FullAttentionSpec, **more) -> Arrays:
    """As tpu-inference's runner makes them; nothing here knows their shape."""
    import torch
    from tpu_inference import utils
    from tpu_inference.runner.kv_cache import create_kv_caches

    mesh = Mesh(np.array(jax.devices()[:devices]).reshape(1, -1), ("data", "model"))
    padded, width = utils.get_padded_num_heads(heads, devices), utils.get_padded_head_dim(dim)
    made = create_kv_caches(NUM_BLOCKS, BLOCK_TOKENS, padded, width, mesh, LAYERS, jax.numpy.dtype(dtype))
    sizes = {"block_size": BLOCK_TOKENS, "num_kv_heads": padded, "head_size": width, "dtype": getattr(torch, dtype)}
    group = SimpleNamespace(layer_names=LAYERS, kv_cache_spec=spec(**sizes, **more))
    config = SimpleNamespace(transfer_group_ids=[0], kv_cache_groups=[group])
    index = {layer: number for number, layer in enumerate(LAYERS)}
    return Arrays(config, made, index, devices, len(LAYERS), heads, dim)


class Pictures:
    """What lies in the arrays of each rank, on the host."""

    def __init__(self, arrays: Arrays) -> None:
        self.layouts = [described.layout for described in describe_ranks(arrays)]
        self.memories = [oracle.Memory.poisoned(layout) for layout in self.layouts]
        self._arrays = arrays
        self._bits = np.dtype(f"u{arrays.arrays[0].dtype.itemsize}")

    def rows(self, rank: int, layer: int):
        """A rank's part of an array, as that is indexed."""
        array, memory = self._arrays.arrays[layer], self.memories[rank]
        shape = array.sharding.shard_shape(array.shape)
        return memory.buffers[self.layouts[rank].regions[layer].address].view(self._bits).reshape(shape)

    def merged(self, rank: int, layer: int):
        """The rows of all tokens, as tpu-inference makes them of a rank's keys and values."""
        from tpu_inference import utils
        from tpu_inference.kernels.ragged_paged_attention.v3 import kernel, kernel_hd64

        heads, devices, dim = self._arrays.num_heads, self._arrays.num_ranks, self._arrays.head_dim
        padded = utils.get_padded_num_heads(heads, devices)
        mine = slice(rank * padded // devices, (rank + 1) * padded // devices)
        keys, values = (np.repeat(self._values(layer, kind), padded // heads, axis=1)[:, mine] for kind in "kv")
        merge = kernel_hd64.merge_kv if dim == 64 else kernel.merge_kv
        return np.asarray(merge(jax.numpy.asarray(keys), jax.numpy.asarray(values)))

    def _values(self, layer: int, kind: str):
        (state,) = (s for s in self.layouts[0].states if s.name == f"model.layers.{layer}.{kind}")
        shape = NUM_TOKENS, *(axis.extent for axis in state.axes)
        found = b"".join(value_of(state, token, tuple(where)) for token, *where in np.ndindex(shape))
        return np.frombuffer(found, self._bits).reshape(shape)


def slots():
    return [(token, TABLE[token // BLOCK_TOKENS], token % BLOCK_TOKENS) for token in range(NUM_TOKENS)]


def move(sources, source_table, targets, target_table):
    """Everything, planned; how often each byte of each target was written."""
    layouts = [[memory.layout for memory in side] for side in (sources, targets)]
    found, counts = route(*layouts), []
    for rank, target in enumerate(targets):
        written = {start: np.zeros_like(buffer) for start, buffer in target.buffers.items()}
        for source in found.sources_of(rank):
            program = bind(found.between(source, rank), sources[source].layout, target.layout)
            copies = copies_for(program, [source_table], [target_table], [TOKENS])
            oracle.execute(copies, sources[source], target, written)
        counts.append(written)
    return counts


def others(arrays: Arrays):
    """An engine with an ordinary layout, and another number of ranks where heads can be divided."""
    item = arrays.arrays[0].dtype
    model = attention(len(LAYERS), arrays.num_heads, arrays.head_dim, item.name, item.itemsize)
    shape = OTHER_SHAPE if arrays.num_heads != 3 else EngineShape(1, 1, 3, 8, "head-major")
    return [oracle.Memory.poisoned(layout) for layout in describe(model, shape, 1 << 40)]


@DTYPES
@GEOMETRIES
def test_what_tpu_inference_writes_arrives_in_an_ordinary_layout(heads, dim, devices, dtype):
    arrays = arrays_of(heads, dim, devices, dtype)
    pictures = Pictures(arrays)
    for rank, layer in np.ndindex(devices, len(LAYERS)):
        rows, merged = pictures.rows(rank, layer), pictures.merged(rank, layer)
        for token, block, slot in slots():
            rows[block, slot] = merged[token]
    targets = others(arrays)
    for target, written in zip(targets, move(pictures.memories, TABLE, targets, OTHER_TABLE), strict=True):
        oracle.expect(target, [OTHER_TABLE], [TOKENS], written)


@DTYPES
@GEOMETRIES
def test_what_comes_from_an_ordinary_layout_is_what_tpu_inference_would_have_written(heads, dim, devices, dtype):
    arrays = arrays_of(heads, dim, devices, dtype)
    pictures, sources = Pictures(arrays), others(arrays)
    for rank, layer in np.ndindex(devices, len(LAYERS)):
        # The padding stays as it is: zeros, which the kernels wrote there or nobody has.
        pictures.rows(rank, layer)[:] = 0
    for source in sources:
        oracle.fill(source, [OTHER_TABLE], TOKENS)
    move(sources, OTHER_TABLE, pictures.memories, TABLE)
    for rank, layer in np.ndindex(devices, len(LAYERS)):
        rows, merged = pictures.rows(rank, layer), pictures.merged(rank, layer)
        assert all(np.array_equal(rows[block, slot], merged[token]) for token, block, slot in slots())


def test_a_window_is_told():
    described = describe_ranks(arrays_of(2, 32, 1, "float32", SlidingWindowSpec, sliding_window=7))
    assert {state.window_tokens for state in described[0].layout.states} == {7}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head_dim": 100, "num_heads": 4}, "expected an array"),
        ({"head_dim": 130}, "expected an array"),
    ],
)
def test_arrays_of_another_shape_are_refused(changes, message):
    with pytest.raises(LayoutError, match=message):
        describe_ranks(replace(arrays_of(2, 100, 1, "bfloat16"), **changes))


def test_eight_bits_are_refused_because_scales_are_each_engines_own():
    arrays = arrays_of(2, 128, 1, "float32")
    small = [jax.numpy.zeros((NUM_BLOCKS, BLOCK_TOKENS, 1, 4, 128), jax.numpy.float8_e4m3fn)] * 2
    with pytest.raises(LayoutError, match="8-bit"):
        describe_ranks(replace(arrays, arrays=small))


def test_latent_caches_and_states_of_fixed_size_are_refused():
    with pytest.raises(LayoutError, match="another way"):
        describe_ranks(arrays_of(1, 128, 1, "bfloat16", MLAAttentionSpec))
    arrays = arrays_of(1, 128, 1, "bfloat16")
    with pytest.raises(LayoutError, match="fixed size"):
        describe_ranks(replace(arrays, arrays=[arrays.arrays, arrays.arrays]))
