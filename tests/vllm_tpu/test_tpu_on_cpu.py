"""The attention that stands in for a TPU's kernels here, against the reference that tpu-inference ships with these."""

from __future__ import annotations

import pytest
from engine_server import is_installed

if not is_installed("tpu_inference"):
    pytest.skip("tpu-inference is not installed: see make test-vllm-tpu", allow_module_level=True)

import jax.numpy as jnp
import numpy as np
from tpu_inference.kernels.ragged_paged_attention.v3 import kernel, kernel_hd64
from tpu_on_cpu import attention

BLOCK_TOKENS, NUM_BLOCKS, HEADS = 4, 16, 2
# One that decodes, one whose prompt is computed in chunks, one that begins; the fourth place is empty.
QUERIES, LENGTHS = (1, 5, 6), (7, 9, 6)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("dim", [32, 64, 128])
def test_it_answers_and_writes_as_the_reference(dim, window):
    dice = np.random.default_rng(7)
    is_half = dim == 64
    shape_of = kernel_hd64.get_kv_cache_shape if is_half else kernel.get_kv_cache_shape
    reference = kernel_hd64.ref_ragged_paged_attention_hd64 if is_half else kernel.ref_ragged_paged_attention

    def random(*shape):
        return jnp.asarray(dice.normal(size=shape), jnp.float32)

    cache = random(*shape_of(NUM_BLOCKS, BLOCK_TOKENS, HEADS, dim, jnp.float32))
    tokens = sum(QUERIES)
    queries, keys, values = random(tokens, 4, dim), random(tokens, HEADS, dim), random(tokens, HEADS, dim)
    tables = jnp.asarray(dice.permutation(NUM_BLOCKS), jnp.int32)
    lengths = jnp.asarray([*LENGTHS, 0], jnp.int32)
    starts = jnp.asarray(np.cumsum([0, *QUERIES, 0]), jnp.int32)
    asked = (queries, keys, values, cache, lengths, tables, starts, jnp.asarray([1, 1, 3], jnp.int32))
    answers, written = attention(*asked, sm_scale=dim**-0.5, sliding_window=window)
    expected, rows = reference(*asked, sm_scale=dim**-0.5, sliding_window=window)
    np.testing.assert_allclose(answers, expected, atol=1e-5)
    np.testing.assert_array_equal(written, rows)
