"""What lets tpu-inference serve on JAX's CPU platform: two plug-ins of vLLM's.

Everything else is tpu-inference's own: its runner, its models, the arrays of its cache, their shapes, and what is
donated.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# XLA's CPU platform reports no memory, and the kinds of TPUs are all that tpu-inference knows the sizes of.
MEMORY_BYTES = 64 << 20


ENTRY_POINTS = """
[vllm.platform_plugins]
tpu_on_cpu = tpu_on_cpu:platform
[vllm.general_plugins]
tpu_on_cpu = tpu_on_cpu:install
"""


def write_plugin(folder: Path) -> None:
    """What makes vLLM find the plug-ins in a folder that is on its path, as if they had been installed there."""
    about = folder / "tpu_on_cpu-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: tpu-on-cpu\nVersion: 1\n")
    (about / "entry_points.txt").write_text(ENTRY_POINTS)


def platform() -> str:
    """vLLM takes a machine for one with TPUs where libtpu is, which has 690 MB and is not used here."""
    return "tpu_inference.platforms.tpu_platform.TpuPlatform"


def install() -> None:
    """Replace the two kernels of ragged paged attention, what says how large the device's memory is, options that only
    the compiler for TPUs knows, and what takes for granted that the device has memory of its own."""
    from tpu_inference import utils
    from tpu_inference.models.common import compiler_options

    # Taken from here by name: before anything else.
    compiler_options.get_step_fn_compiler_options = compiler_options.get_sampling_compiler_options = dict
    from tpu_inference.layers.common import attention_interface

    attention_interface.ragged_paged_attention = attention
    attention_interface.ragged_paged_attention_hd64 = attention
    utils.hbm_usage_bytes = lambda devices: [(0, MEMORY_BYTES)] * len(devices)
    put = utils.general_device_put

    def put_a_copy(arrays: Any, **how: Any) -> Any:
        """The buffers of the host in which a step is prepared are those of the next one. A TPU is sent a copy of them,
        and a CPU reads them where they lie, when it gets there."""
        return put(jax.tree.map(lambda one: one.copy() if isinstance(one, np.ndarray) else one, arrays), **how)

    utils.general_device_put = put_a_copy


def attention(
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    kv_cache: jax.Array,
    kv_lens: jax.Array,
    page_indices: jax.Array,
    cu_q_lens: jax.Array,
    distribution: jax.Array,
    *,
    sm_scale: float = 1.0,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[jax.Array, jax.Array]:
    """As tpu-inference's kernels: writes keys and values into the cache, and answers from what is there."""
    if unknown := {name for name, value in others.items() if value not in (None, True)}:
        raise NotImplementedError(", ".join(sorted(unknown)))
    num_seqs, page_size = kv_lens.shape[0], kv_cache.shape[1]
    token = jnp.arange(queries.shape[0])
    sequence = jnp.clip(jnp.searchsorted(cu_q_lens[1:], token, side="right"), 0, num_seqs - 1)
    is_one = token < cu_q_lens[distribution[-1]]
    place = kv_lens[sequence] - (cu_q_lens[sequence + 1] - token)
    tables = page_indices.reshape(num_seqs, -1)
    slot = tables[sequence, place // page_size] * page_size + place % page_size
    slots = kv_cache.reshape(-1, *kv_cache.shape[2:])
    slots = slots.at[jnp.where(is_one, slot, len(slots))].set(_merged(keys, values), mode="drop")

    def one(number: jax.Array) -> jax.Array:
        mine = (tables[number][:, None] * page_size + jnp.arange(page_size)).reshape(-1)
        seen, at = slots[mine], jnp.arange(len(mine))
        mask = (is_one & (sequence == number))[:, None] & (at <= place[:, None])
        if sliding_window is not None:
            mask &= place[:, None] < at + sliding_window
        return _attended(queries, *_split(seen, keys.shape[1], keys.shape[2]), mask, sm_scale)

    answers = jax.lax.map(one, jnp.arange(num_seqs)).sum(0)
    return answers.astype(queries.dtype), slots.reshape(kv_cache.shape)


def _merged(keys: jax.Array, values: jax.Array) -> jax.Array:
    """A token's row of the cache, as tpu-inference makes it."""
    from tpu_inference.kernels.ragged_paged_attention.v3 import kernel, kernel_hd64

    merge = kernel_hd64.merge_kv if keys.shape[2] == 64 else kernel.merge_kv
    return merge(keys, values)


def _split(rows: jax.Array, num_heads: int, head_dim: int) -> tuple[jax.Array, jax.Array]:
    """Keys and values, from rows: the other way round."""
    width = head_dim if head_dim == 64 else -(-head_dim // 128) * 128
    pairs = rows.reshape(len(rows), -1)[:, : num_heads * 2 * width].reshape(len(rows), num_heads, 2, width)
    return pairs[:, :, 0, :head_dim], pairs[:, :, 1, :head_dim]


def _attended(queries: jax.Array, keys: jax.Array, values: jax.Array, mask: jax.Array, sm_scale: float) -> jax.Array:
    """For all tokens; 0 where a token sees nothing here."""
    num_tokens, num_heads, head_dim = queries.shape
    grouped = queries.reshape(num_tokens, keys.shape[1], -1, head_dim).astype(jnp.float32)
    scores = jnp.einsum("tkgd,skd->kgts", grouped, keys.astype(jnp.float32)) * sm_scale
    weights = jax.nn.softmax(jnp.where(mask, scores, -1e30), axis=-1) * mask
    return jnp.einsum("kgts,skd->tkgd", weights, values.astype(jnp.float32)).reshape(num_tokens, num_heads, head_dim)
