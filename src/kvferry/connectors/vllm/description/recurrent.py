"""Layers with states of fixed size: vLLM packs them into a page of bytes, one after another, padded at the end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum

from kvferry.connectors.vllm.description.parts import Cache, Part, Parts, dtype_word, unsupported
from kvferry.layout import Axis, CacheGroup, Span, State


@dataclass(frozen=True, slots=True)
class _Axis:
    """An axis, this rank's part of it, and over how many ranks it is divided: 1 where each has a copy."""

    name: str
    local: int
    ranks: int

    def over(self, cache: Cache) -> tuple[Axis, Span]:
        start = cache.engine.tensor_rank * self.local if self.ranks > 1 else 0
        return Axis(self.name, self.local * self.ranks), Span(start, start + self.local)


@dataclass(frozen=True, slots=True)
class _Convolution:
    """A convolution state: its channels, of which each named projection has some, and its inputs."""

    num_channels: int
    width: int
    channel_stride: int
    width_stride: int


def recurrent_parts(cache: Cache) -> Parts:
    """Convolution and recurrent states of one layer, each projection of the convolution a state of its own."""
    kinds = {
        MambaAttentionBackendEnum.MAMBA1: (_mamba1, 2),
        MambaAttentionBackendEnum.MAMBA2: (_mamba2, 2),
        MambaAttentionBackendEnum.GDN_ATTN: (_delta_net, 2),
        MambaAttentionBackendEnum.SHORT_CONV: (_short_convolution, 1),
    }
    spec = cache.spec
    describe, num_states = kinds.get(spec.mamba_type, (None, 0))
    if describe is None:
        raise unsupported(cache.layer, spec, "this kind of state is not supported", found=str(spec.mamba_type))
    if len(spec.shapes) != num_states or len(spec.dtypes) != num_states or len(spec.shapes[0]) != 2:
        what = f"{num_states} states are known of {spec.mamba_type.name}, the first of two dimensions"
        hint = "leave ReplaySSM off" if len(spec.shapes) > num_states else ""
        raise unsupported(cache.layer, spec, what, found=str(spec.shapes), hint=hint)
    if cache.tensor.element_size() != 1 or cache.tensor.shape[-1] < spec.state_content_size_bytes:
        found = f"{tuple(cache.tensor.shape)} of {cache.tensor.dtype}"
        raise unsupported(cache.layer, spec, "its pages do not hold its states as raw bytes", found=found)
    group = CacheGroup(block_tokens=1, num_blocks=cache.num_blocks, ring_tokens=0)
    return Parts(group, tuple(describe(cache)))


def _ranks(cache: Cache) -> int:
    return 1 if cache.spec.tp_replicated else cache.engine.tensor_parallel


def _mamba1(cache: Cache) -> list[Part]:
    conv, shape = _convolution(cache), cache.spec.shapes[1]
    if len(shape) != 2 or shape[0] != conv.num_channels:
        raise unsupported(
            cache.layer, cache.spec, "its states have different numbers of channels", found=str(cache.spec.shapes)
        )
    channel = _Axis("channel", conv.num_channels, _ranks(cache))
    return [
        _projection(cache, "conv", (channel,), 0),
        _recurrent(cache, (channel, _Axis("state", shape[1], 1))),
    ]


def _mamba2(cache: Cache) -> list[Part]:
    """x follows the heads. B and C follow the groups, of which vLLM gives each rank a copy when there is only one."""
    conv, shape = _convolution(cache), cache.spec.shapes[1]
    heads, head_dim, state_dim = _three(cache)
    num_groups, rest = divmod(conv.num_channels - heads * head_dim, 2 * state_dim)
    if num_groups < 1 or rest:
        raise unsupported(
            cache.layer, cache.spec, "its channels are not those of x, B and C", found=f"{conv} beside {shape}"
        )
    ranks = _ranks(cache)
    head, dim = _Axis("head", heads, ranks), _Axis("head_dim", head_dim, 1)
    group, state = _Axis("group", num_groups, _group_ranks(cache, num_groups)), _Axis("state", state_dim, 1)
    x, b = heads * head_dim, num_groups * state_dim
    return [
        _projection(cache, "conv.x", (head, dim), 0),
        _projection(cache, "conv.b", (group, state), x),
        _projection(cache, "conv.c", (group, state), x + b),
        _recurrent(cache, (head, dim, state)),
    ]


def _group_ranks(cache: Cache, local: int) -> int:
    """Over how many ranks the groups are divided."""
    ranks, total = _ranks(cache), cache.engine.num_state_groups
    # Only a group of its own per rank can be a copy: vLLM copies a single one, and divides several.
    if ranks == 1 or total == local * ranks or (total == 0 and local > 1):
        return ranks
    if total == local == 1:
        return 1
    found = f"{local} groups on each of {ranks} ranks, {total or 'an unknown number'} in the model"
    raise unsupported(cache.layer, cache.spec, "its groups are not divided evenly among the ranks", found=found)


def _delta_net(cache: Cache) -> list[Part]:
    conv = _convolution(cache)
    heads, value_dim, key_dim = _three(cache)
    num_key_heads, rest = divmod(conv.num_channels - heads * value_dim, 2 * key_dim)
    if num_key_heads < 1 or rest:
        found = f"{conv} beside {cache.spec.shapes[1]}"
        raise unsupported(
            cache.layer, cache.spec, "its channels are not those of queries, keys and values", found=found
        )
    ranks = _ranks(cache)
    key_head, value_head = _Axis("head", num_key_heads, ranks), _Axis("head", heads, ranks)
    key, value = _Axis("key_dim", key_dim, 1), _Axis("value_dim", value_dim, 1)
    size = num_key_heads * key_dim
    return [
        _projection(cache, "conv.q", (key_head, key), 0),
        _projection(cache, "conv.k", (key_head, key), size),
        _projection(cache, "conv.v", (value_head, value), 2 * size),
        _recurrent(cache, (value_head, value, key)),
    ]


def _short_convolution(cache: Cache) -> list[Part]:
    channel = _Axis("channel", _convolution(cache).num_channels, _ranks(cache))
    return [_projection(cache, "conv", (channel,), 0)]


def _three(cache: Cache) -> tuple[int, int, int]:
    shape = cache.spec.shapes[1]
    if len(shape) != 3:
        raise unsupported(
            cache.layer, cache.spec, "its recurrent state does not have three dimensions", found=str(shape)
        )
    return shape[0], shape[1], shape[2]


def _convolution(cache: Cache) -> _Convolution:
    """Behind the inputs that the next token needs, speculative decoding keeps room for as many as it guesses."""
    shape, item_bytes = cache.spec.shapes[0], cache.spec.dtypes[0].itemsize
    if cache.engine.conv_dim_first:
        channels, width, strides = shape[0], shape[1], (shape[1], 1)
    else:
        channels, width, strides = shape[1], shape[0], (1, shape[1])
    # Mamba 1 knows no speculation: its width is the kernel's.
    guessed = 0 if cache.spec.mamba_type == MambaAttentionBackendEnum.MAMBA1 else cache.spec.num_speculative_blocks
    if width <= guessed:
        raise unsupported(cache.layer, cache.spec, "its convolution state is empty", found=str(shape))
    return _Convolution(channels, width - guessed, strides[0] * item_bytes, strides[1] * item_bytes)


def _projection(cache: Cache, name: str, axes: Sequence[_Axis], first_channel: int) -> Part:
    """Some channels of the convolution, numbered by `axes`, and the inputs of each."""
    conv = _convolution(cache)
    strides = [prod(a.local for a in axes[at + 1 :]) * conv.channel_stride for at in range(len(axes))]
    return _part(
        cache,
        (name, 0),
        (*axes, _Axis("width", conv.width, 1)),
        first_channel * conv.channel_stride,
        (*strides, conv.width_stride),
    )


def _recurrent(cache: Cache, axes: Sequence[_Axis]) -> Part:
    """The second state of the page, in the order of its axes."""
    spec = cache.spec
    offset = prod(spec.shapes[0]) * spec.dtypes[0].itemsize
    strides = tuple(prod(a.local for a in axes[at + 1 :]) * spec.dtypes[1].itemsize for at in range(len(axes)))
    return _part(cache, ("ssm", 1), axes, offset, strides)


def _part(cache: Cache, name: tuple[str, int], axes: Sequence[_Axis], offset: int, strides: tuple[int, ...]) -> Part:
    dtype = cache.spec.dtypes[name[1]]
    found = [axis.over(cache) for axis in axes]
    state = State(
        f"{cache.prefix}.{name[0]}", dtype_word(dtype), dtype.itemsize, tuple(axis for axis, _ in found), False
    )
    return Part(state, offset, tuple(span for _, span in found), strides, cache.byte_strides[0], 0)
