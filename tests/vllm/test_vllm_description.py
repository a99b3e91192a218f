"""The description of vLLM's caches against vLLM itself: its specifications, allocator, operators and loaders."""

import importlib
import random
import warnings
from dataclasses import replace
from math import prod
from types import SimpleNamespace
from unittest.mock import patch

import pytest

pytest.importorskip("vllm.v1", reason="needs vLLM's own environment")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM's and torch's own, at import
    importlib.import_module("vllm.model_executor.layers.mamba.mamba_mixer2")

import torch
from described_ranks import BLOCKS, DIM, HEADS, NAMES, facts, full, make_rank, mla, spec_of
from engines.oracle import element_addresses, execute
from vllm import _custom_ops as ops
from vllm.model_executor.layers.mamba.mamba_mixer2 import mamba_v2_sharded_weight_loader
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator
from vllm.model_executor.layers.rotary_embedding import _ROPE_DICT, get_rope, phi3_long_rope_scaled_rope
from vllm.v1 import kv_cache_interface
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum as Mamba
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    KVCacheGroupSpec,
    KVQuantMode,
    MambaSpec,
    SinkFullAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from kvferry.connectors.vllm.description.cpu_block_layout import Tile, probe
from kvferry.connectors.vllm.description.describe import LayerFacts, describe
from kvferry.connectors.vllm.description.engine_facts import has_long_factors
from kvferry.connectors.vllm.scheduler.scheduler import _running
from kvferry.connectors.vllm_keys import IF_BOTH
from kvferry.errors import IncompatibleError, LayoutError
from kvferry.plan.description.layout import Axis, contents
from kvferry.plan.description.span import Span
from kvferry.plan.description.tokens import TokenRange
from kvferry.plan.programs.program import bind
from kvferry.plan.programs.request import copies_for
from kvferry.plan.routing.route import route


def table(seed, count):
    return tuple(random.Random(seed).sample(range(1, BLOCKS), count))


def move(sources, targets, tables, tokens):
    """Plan and copy: `tables` are the source's and the target's, one per cache group of vLLM's."""
    plan = route([s.layout for s in sources], [t.layout for t in targets])
    for left, right in plan.pairs():
        source, target = sources[left], targets[right]
        program = bind(plan.between(left, right), source.layout, target.layout)
        ranges = target.described.ranges([tokens] * len(target.config.transfer_groups))
        copies = copies_for(program, source.described.tables(tables[0]), target.described.tables(tables[1]), ranges)
        execute(copies, source.memory, target.memory, {})


def check(rank, tables, tokens, read):
    """Every element that we place holds what vLLM's own view of it holds."""
    states, num_elements = rank.layout.state_named(), 0
    for placement in rank.layout.placements:
        state = states[placement.state]
        for token, at, address in element_addresses(rank.layout, placement, tables, tokens):
            expected = read(placement.state, token, at).contiguous().view(torch.uint8).numpy().tobytes()
            assert rank.bytes_at(address, state.item_bytes) == expected, (placement.state, token, at)
            num_elements += 1
    assert num_elements


# --- attention ---


@pytest.mark.parametrize("layout", list(KVCacheLayout), ids=lambda layout: layout.name)
def test_keys_and_values_lie_where_vllms_views_have_them(layout):
    rank = make_rank([(full(), NAMES)], facts(), layout)
    rank.scramble()
    blocks = table(1, 3)

    def read(name, token, at):
        cache = rank.caches[NAMES[int(name.split(".")[2])]]
        return cache[blocks[token // 16], at[0], token % 16, at[1] + (DIM if name.endswith("v") else 0)].view(1)

    check(rank, [blocks], TokenRange(0, 41), read)
    assert [state.name for state in rank.layout.states] == [f"model.layers.{n}.{k}" for n in (0, 1) for k in "kv"]
    assert rank.layout.states[0].axes == (Axis("head", HEADS), Axis("dim", DIM))
    assert len(rank.described.memories) == 1
    assert rank.described.layer_ends == {NAMES[0]: 2, NAMES[1]: 4}


@pytest.mark.parametrize("layout", [KVCacheLayout.LBHNC, KVCacheLayout.LBNHC], ids=lambda layout: layout.name)
def test_kernel_blocks_within_a_block_and_padded_pages(layout):
    rank = make_rank([(full(32), NAMES)], facts(), layout, kernel=8)
    rank.scramble()
    blocks = table(2, 2)

    def read(name, token, at):
        cache = rank.caches[NAMES[int(name.split(".")[2])]]
        row = blocks[token // 32] * 4 + token % 32 // 8
        return cache[row, at[0], token % 8, at[1] + (DIM if name.endswith("v") else 0)].view(1)

    check(rank, [blocks], TokenRange(3, 50), read)
    padded = make_rank([(full(page_size_padded=full().page_size_bytes + 512), NAMES)], facts())
    assert padded.layout.placements[0].block_stride == full().page_size_bytes + 512


@pytest.mark.parametrize(("ranks", "heads", "spans"), [(2, 4, [0, 2]), (4, 2, [0, 0, 1, 1]), (4, 1, [0, 0, 0, 0])])
def test_heads_are_divided_and_copied_as_vllm_does(ranks, heads, spans):
    local = max(1, heads // ranks)
    found = []
    for rank in range(ranks):
        engine = facts(tensor_parallel=ranks, tensor_rank=rank, num_heads=heads)
        placement = make_rank([(full(heads=local), NAMES)], engine).layout.placements[0]
        assert len(placement.spans[0]) == local
        found.append(placement.spans[0].start)
    assert found == spans


def test_windows_and_chunks_come_from_the_layer_where_groups_are_merged():
    layers = {NAMES[0]: LayerFacts("FLASH_ATTN", window_tokens=24), NAMES[1]: LayerFacts("FLASH_ATTN")}
    rank = make_rank([(full(sliding_window=24), NAMES)], facts(layers=layers))
    assert [state.window_tokens for state in rank.layout.states] == [24, 24, 0, 0]
    groups = [
        (full(kind=SlidingWindowSpec, sliding_window=20), NAMES[:1]),
        (full(kind=ChunkedLocalAttentionSpec, attention_chunk_size=64), NAMES[1:]),
    ]
    rank = make_rank(groups, facts())
    limits = [(state.window_tokens, state.chunk_tokens) for state in rank.layout.states]
    assert limits == [(20, 0), (20, 0), (0, 64), (0, 64)]
    assert [placement.group for placement in rank.layout.placements] == [0, 0, 1, 1]
    # Groups share storage: block ids are their own, bytes are not.
    assert len(rank.layout.regions) == 1
    with pytest.raises(LayoutError, match="size of its window"):
        make_rank([(full(sliding_window=24), NAMES)], facts(layers={}))


def test_layers_of_one_group_may_have_specifications_of_their_own():
    specs = {NAMES[0]: full(heads=4), NAMES[1]: full(heads=2)}
    group = UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs=specs)
    rank = make_rank([(group, NAMES)], facts())
    assert [state.axes[0].extent for state in rank.layout.states] == [4, 4, 2, 2]
    assert len(rank.described.groups) == 1


def test_a_layer_that_reuses_the_cache_of_another_has_none_of_its_own():
    rank = make_rank([(full(), NAMES[:1])], facts())
    config = replace(rank.config, kv_cache_groups=[KVCacheGroupSpec(list(NAMES), full())])
    shared = describe(config, {name: rank.caches[NAMES[0]] for name in NAMES}, facts())
    assert {state.name for state in shared.layout.states} == {"model.layers.0.k", "model.layers.0.v"}
    assert shared.layer_ends == {NAMES[0]: 2}


def test_tokens_are_shared_out_by_context_parallelism():
    engine = facts(context_parallel=2, context_rank=1, run_tokens=8, tensor_parallel=2, num_heads=1)
    rank = make_rank([(full(heads=1), NAMES)], engine)
    share = rank.layout.groups[0].share
    assert (share.num_shares, share.share, share.run_tokens) == (2, 1, 8)


def written(rank, blocks, num_tokens):
    """The rank's own part of a request, as vLLM's slot mapping has it: each layer, token, head and dimension another
    value. Context parallelism deals tokens out to the ranks in runs, and a block is that of all of them."""
    engine = rank.engine
    first_head = head_span(rank).start
    for name in rank.caches:
        cache, layer = rank.caches[name], int(name.split(".")[2])
        block, turn = cache.shape[2], engine.run_tokens * engine.context_parallel
        for token in range(num_tokens):
            if token // engine.run_tokens % engine.context_parallel != engine.context_rank:
                continue
            place = token % (block * engine.context_parallel)
            slot = place // turn * engine.run_tokens + place % engine.run_tokens
            at = cache[blocks[token // (block * engine.context_parallel)], :, slot]
            heads = first_head + torch.arange(at.shape[0]).view(-1, 1)
            at[:] = layer * 1e6 + token * 1e3 + heads * 100 + torch.arange(at.shape[1])
    return rank


@pytest.mark.parametrize("run_tokens", [1, 4, 16])
@pytest.mark.parametrize("reverse", [False, True], ids=["shared out to whole", "whole to shared out"])
def test_what_context_parallelism_shares_out_becomes_whole_and_back(run_tokens, reverse):
    def engine(rank):
        return facts(context_parallel=2, context_rank=rank, run_tokens=run_tokens, tensor_parallel=2, num_heads=1)

    def ranks():
        both = [make_rank([(full(heads=1), NAMES)], replace(engine(rank), tensor_rank=rank)) for rank in (0, 1)]
        return (both, table(5, 2)), ([make_rank([(full(heads=1), NAMES)], facts(num_heads=1))], table(6, 3))

    check_moved(ranks, reverse, 41)


@pytest.mark.parametrize("reverse", [False, True], ids=["stages to one", "one to stages"])
def test_each_stage_of_a_pipeline_has_its_own_layers(reverse):
    names = tuple(f"model.layers.{n}.self_attn.attn" for n in range(4))

    def ranks():
        stages = [make_rank([(full(), part)], facts(names)) for part in (names[:1], names[1:])]
        return (stages, table(7, 3)), ([make_rank([(full(), names)], facts(names))], table(8, 3))

    check_moved(ranks, reverse, 41)


def check_moved(ranks, reverse, num_tokens):
    """From one engine to the other, of which `ranks` makes new ones with their block tables."""
    (sources, left), (targets, right) = reversed(ranks()) if reverse else ranks()
    (_, (expected, _)) = reversed(ranks()) if reverse else ranks()
    for source in sources:
        written(source, left, num_tokens)
    move(sources, targets, ([left], [right]), TokenRange(0, num_tokens))
    for target, wanted in zip(targets, expected, strict=True):
        written(wanted, right, num_tokens)
        assert all(torch.equal(target.caches[name], wanted.caches[name]) for name in wanted.caches)


# --- attention on CPUs, whose inside only vLLM's operator knows ---


def write_attention(rank, blocks, num_tokens, span, isa):
    """Tokens of a request into every layer, through vLLM's operator; values tell layer, token, head and dim."""
    for number, name in enumerate(NAMES):
        cache = rank.caches[name]
        block = cache.shape[2]
        heads = torch.arange(span.start, span.stop).view(1, -1, 1)
        key = torch.arange(num_tokens).view(-1, 1, 1) * 1000 + heads * DIM + torch.arange(DIM) + number * 0.25
        key, value = key.to(cache.dtype), (key + 0.5).to(cache.dtype)
        slots = torch.tensor([blocks[t // block] * block + t % block for t in range(num_tokens)])
        halves = cache.view(cache.shape[0], cache.shape[1], 2 * block, DIM).chunk(2, dim=2)
        ops.cpu_attn_reshape_and_cache(key.contiguous(), value.contiguous(), *halves, slots, isa)


def cpu_ranks(block, ranks=1, isa="vec", dtype=torch.float32):
    layers = {name: LayerFacts("CPU_ATTN", isa) for name in NAMES}
    spec = replace(full(block, HEADS // ranks), dtype=dtype)
    shapes = [facts(tensor_parallel=ranks, tensor_rank=rank, layers=layers) for rank in range(ranks)]
    return [make_rank([(spec, NAMES)], shape) for shape in shapes]


def head_span(rank):
    return rank.layout.placements[0].spans[0]


@pytest.mark.parametrize(
    ("source", "target"),
    [((32, 1), (64, 1)), ((64, 1), (32, 1)), ((32, 2), (64, 1)), ((64, 1), (32, 2)), ((32, 1), (16, 1))],
)
def test_cpu_blocks_of_other_sizes_become_what_vllm_would_have_written(source, target):
    num_tokens = 77
    sources, targets = cpu_ranks(*source), cpu_ranks(*target)
    expected = cpu_ranks(*target)
    left, right = table(3, -(-num_tokens // source[0])), table(4, -(-num_tokens // target[0]))
    for rank in sources:
        write_attention(rank, left, num_tokens, head_span(rank), "vec")
    move(sources, targets, ([left], [right]), TokenRange(0, num_tokens))
    for rank, wanted in zip(targets, expected, strict=True):
        write_attention(wanted, right, num_tokens, head_span(wanted), "vec")
        for name in NAMES:
            assert torch.equal(rank.caches[name], wanted.caches[name])


def test_keys_of_cpu_blocks_are_column_major_and_say_so():
    (rank,) = cpu_ranks(32)
    key, value = rank.layout.placements[:2]
    assert (key.token_stride, key.strides[1]) == (4, 32 * 4)
    assert (value.token_stride, value.strides[1], value.offset - key.offset) == (DIM * 4, 4, 32 * DIM * 4)


@pytest.mark.skipif(not torch.cpu._is_avx512_supported(), reason="vLLM needs AVX-512 for 8-bit caches on CPUs")
def test_cpu_blocks_of_eight_bits_are_probed_like_others():
    layers = {name: LayerFacts("CPU_ATTN", "vec") for name in NAMES}
    spec = replace(full(32, kv_quant_mode=KVQuantMode.FP8_PER_TENSOR), dtype=torch.uint8)
    key, value = make_rank([(spec, NAMES)], facts(layers=layers, cache_dtype="fp8")).layout.placements[:2]
    assert (key.token_stride, key.strides[1], value.offset - key.offset) == (1, 32, 32 * DIM)


class _Tiles:
    """The element order of AMX, made with torch: dims in pairs, tokens in groups of 16."""

    @staticmethod
    def write(key, value, key_cache, value_cache, slots, isa, **_):
        block, heads, dim = key_cache.shape[2], key.shape[1], key.shape[2]
        for token, slot in enumerate(slots.tolist()):
            at, row = divmod(slot, block)
            for head in range(heads):
                tile = key_cache[at, head].view(block // 16, dim // 2, 16, 2)
                tile[row // 16, :, row % 16] = key[token, head].view(-1, 2)
                value_cache[at, head, row] = value[token, head]


def test_blocks_packed_in_another_way_move_as_pieces_between_engines_that_pack_alike(monkeypatch):
    monkeypatch.setattr(ops, "cpu_attn_reshape_and_cache", _Tiles.write)
    num_tokens, isa = 45, "tiles-of-16"
    sources, targets = cpu_ranks(32, 2, isa), cpu_ranks(32, 1, isa)
    states = sources[0].layout.states
    assert {state.name for state in states} == {"model.layers.0.kv_block", "model.layers.1.kv_block"}
    assert states[0].dtype == "float32:tiles-of-16:block32"
    assert sources[0].described.groups[0].whole_tokens == 32
    left, right = table(5, 2), table(6, 2)
    for rank in sources:
        write_attention(rank, left, num_tokens, head_span(rank), isa)
    move(sources, targets, ([left], [right]), TokenRange(0, num_tokens))
    (wanted,) = cpu_ranks(32, 1, isa)
    write_attention(wanted, right, num_tokens, Span(0, HEADS), isa)
    for name in NAMES:
        assert torch.equal(targets[0].caches[name], wanted.caches[name])
    with pytest.raises(IncompatibleError, match=r"tiles-of-16:block32.*tiles-of-16:block64"):
        move(sources, cpu_ranks(64, 1, isa), ([left], [right]), TokenRange(0, num_tokens))
    monkeypatch.undo()
    with pytest.raises(IncompatibleError, match="kv_block"):
        move(sources, cpu_ranks(32), ([left], [right]), TokenRange(0, num_tokens))


@pytest.mark.skipif(not torch.cpu._is_amx_tile_supported(), reason="needs a CPU with AMX")
def test_amx_packs_blocks_that_move_as_pieces():
    assert probe(Tile("amx", torch.bfloat16, torch.bfloat16, "auto", 32, DIM)) is None
    sources, targets = cpu_ranks(32, 1, "amx", torch.bfloat16), cpu_ranks(32, 2, "amx", torch.bfloat16)
    left, right = table(5, 2), table(6, 2)
    write_attention(sources[0], left, 45, Span(0, HEADS), "amx")
    move(sources, targets, ([left], [right]), TokenRange(0, 45))
    for rank, wanted in zip(targets, cpu_ranks(32, 2, "amx", torch.bfloat16), strict=True):
        write_attention(wanted, right, 45, head_span(wanted), "amx")
        for name in NAMES:
            assert torch.equal(rank.caches[name], wanted.caches[name])


def test_pieces_are_those_that_a_window_still_sees():
    (rank,) = cpu_ranks(32)
    piece = replace(rank.described.groups[0], whole_tokens=32)
    assert piece.range(TokenRange(0, 45)) == TokenRange(0, 2)
    assert piece.range(TokenRange(32, 45)) == TokenRange(1, 2)
    assert piece.range(TokenRange(45, 45)) == TokenRange(0, 0)
    assert replace(piece, window_tokens=8).range(TokenRange(0, 100)) == TokenRange(2, 4)
    assert replace(piece, chunk_tokens=64).range(TokenRange(0, 100)) == TokenRange(2, 4)


def test_a_backend_that_is_not_known_moves_in_pieces():
    rank = make_rank([(full(), NAMES)], facts(backend="ROCM_ATTN"))
    assert rank.layout.states[0].dtype == "float32:ROCM_ATTN:block16"
    with pytest.raises(LayoutError, match="cannot be divided by tokens"):
        make_rank([(full(), NAMES)], facts(backend="ROCM_ATTN", context_parallel=2))


# --- latents ---


def test_latent_rows_between_other_block_sizes_and_ranks():
    num_tokens, names = 40, NAMES
    sources = [make_rank([(mla(16), names)], facts(tensor_parallel=2, tensor_rank=r, num_heads=1)) for r in (0, 1)]
    (target,) = [make_rank([(mla(32), names)], facts(num_heads=1))]
    left, right = table(7, 3), table(8, 2)
    for source in sources:
        for number, name in enumerate(names):
            for token in range(num_tokens):
                row = torch.arange(48) + token * 100 + number * 0.5
                source.caches[name][left[token // 16], 0, token % 16] = row
    move(sources, [target], ([left], [right]), TokenRange(0, num_tokens))
    for number, name in enumerate(names):
        for token in range(num_tokens):
            found = target.caches[name][right[token // 32], 0, token % 32]
            assert torch.equal(found, torch.arange(48) + token * 100 + number * 0.5)
    assert target.layout.states[0].name == "model.layers.0.latent"
    assert target.layout.states[0].axes == (Axis("dim", 48),)


V4 = "model.layers.2.attn"
V4_BACKENDS = {
    V4: "FLASHMLA_SPARSE_DSV4",
    f"{V4}.indexer.k_cache": "DEEPSEEK_V4_INDEXER",
    f"{V4}.swa_cache": "DEEPSEEK_SPARSE_SWA",
    f"{V4}.compressor.state_cache": "CompressorBackend",
    f"{V4}.indexer.compressor.state_cache": "CompressorBackend",
}


def swa_mla(block, dim, window, dtype=torch.float32, **changes):
    values = {"num_kv_heads": 1, "head_size": dim, "dtype": dtype, "sliding_window": window, "max_tp_shards": 1}
    return spec_of(SlidingWindowMLASpec, block_size=block, **(values | changes))


def v4_rank(block, packed=False, only=None):
    """A sparse layer of DeepSeek V4, narrower, in the groups that vLLM makes of it, or in one of them: entries of 4
    tokens, the last ones as they are, and what an entry is computed from."""
    version = {"model_version": "deepseek_v4"}
    row = {"dtype": torch.uint8, "state_content_bytes": 24} if packed else {"dtype": torch.bfloat16}
    entries = {
        V4: mla(block, head_size=16, tokens_per_state=4, **version, **row),
        f"{V4}.indexer.k_cache": mla(block, head_size=12, dtype=torch.uint8, tokens_per_state=4),
    }
    groups = [
        (UniformTypeKVCacheSpecs(block_size=block, kv_cache_specs=entries), tuple(entries)),
        (swa_mla(block // 4, 16, 24, **version, **row), (f"{V4}.swa_cache",)),
        (swa_mla(4, 8, 8), (f"{V4}.compressor.state_cache",)),
        (swa_mla(4, 6, 8), (f"{V4}.indexer.compressor.state_cache",)),
    ]
    layers = {name: LayerFacts(backend) for name, backend in V4_BACKENDS.items()}
    chosen = groups if only is None else [groups[only]]
    return make_rank(chosen, facts(layers=layers, num_heads=1), num_blocks=64)


def test_a_layer_with_entries_of_several_tokens_has_the_names_and_limits_of_the_catalog():
    rank = v4_rank(64)
    assert [(s.name, s.compress_ratio, s.window_tokens) for s in rank.layout.states] == [
        ("model.layers.2.compressed", 4, 0),
        ("model.layers.2.indexer.compressed.kv_block", 1, 0),
        ("model.layers.2.latent", 1, 24),
        ("model.layers.2.compressor", 1, 8),
        ("model.layers.2.indexer.compressor", 1, 8),
    ]
    assert [group.block_tokens for group in rank.layout.groups] == [16, 1, 16, 4, 4]
    assert [group.whole_tokens for group in rank.described.groups] == [0, 64, 0, 0, 0]
    packed = v4_rank(64, packed=True)
    assert [s.name for s in packed.layout.states][::2] == [
        "model.layers.2.compressed.kv_block",
        "model.layers.2.kv_block",
        "model.layers.2.indexer.compressor",
    ]
    assert [group.whole_tokens for group in packed.described.groups] == [64, 16, 0, 0]
    assert packed.layout.states[0].dtype == "uint8:FLASHMLA_SPARSE_DSV4:block16"


@pytest.mark.parametrize(
    ("group", "name", "rows"),
    [
        (0, V4, range(26)),
        (1, f"{V4}.swa_cache", range(84, 107)),
        (2, f"{V4}.compressor.state_cache", range(100, 107)),
        (3, f"{V4}.indexer.compressor.state_cache", range(100, 107)),
    ],
)
def test_entries_that_are_complete_move_and_so_does_what_the_next_is_made_of(group, name, rows):
    """Of 107 tokens: 26 entries, the last 23 rows, and 7 tokens from which the next entry is computed."""
    source, target = v4_rank(64, only=group), v4_rank(64, only=group)
    source.scramble(1)
    target.scramble(2)
    left, right = (random.Random(seed).sample(range(1, 64), 27) for seed in (1, 2))
    expected, cache = target.caches[name].clone(), source.caches[name]
    move([source], [target], ([left], [right]), TokenRange(0, 107))
    size = cache.shape[2]
    for row in rows:
        expected[right[row // size], 0, row % size] = cache[left[row // size], 0, row % size]
    # What lies behind the last row in its block is written before it is read.
    behind = right[rows.stop // size], 0, slice(rows.stop % size, None)
    expected[behind] = target.caches[name][behind]
    assert torch.equal(target.caches[name].view(torch.uint8), expected.view(torch.uint8))


def test_what_is_computed_again_is_refused():
    (layer,) = names = (f"{V4}.swa_cache",)
    spec = swa_mla(16, 16, 24, model_version="deepseek_v4", bounded_replay=True)
    if not hasattr(spec, "bounded_replay"):
        pytest.skip("this vLLM computes nothing again")
    with pytest.raises(LayoutError, match="computed again"):
        make_rank([(spec, names)], facts(layers={layer: LayerFacts("DEEPSEEK_SPARSE_SWA")}))


@pytest.mark.skipif(
    not hasattr(kv_cache_interface, "SparseCacheRole"), reason="vLLM 0.29 knows an indexer by its backend"
)
def test_packed_latents_are_bytes_and_an_indexer_is_a_piece():
    indexer = "model.layers.0.self_attn.indexer.k_cache"
    packed = mla(
        head_size=576,
        dtype=torch.uint8,
        cache_dtype_str="fp8_ds_mla",
        kv_quant_mode=KVQuantMode.FP8_PER_TENSOR,
        state_content_bytes=656,
    )
    index = mla(head_size=132, dtype=torch.uint8, cache_role=kv_cache_interface.SparseCacheRole.INDEXER)
    names = ("model.layers.0.self_attn.attn", indexer)
    group = UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs=dict(zip(names, (packed, index), strict=True)))
    rank = make_rank([(group, names)], facts(names, "FLASHMLA_SPARSE"))
    assert [(s.name, s.dtype, s.axes) for s in rank.layout.states] == [
        ("model.layers.0.latent", "uint8", (Axis("byte", 656),)),
        ("model.layers.0.indexer.kv_block", "uint8:FLASHMLA_SPARSE:block16", (Axis("byte", 16 * 132),)),
    ]
    assert [group.whole_tokens for group in rank.described.groups] == [0, 16]
    assert rank.described.tables([(3, 4)]) == ((3, 4), (3, 4))
    assert rank.described.ranges([TokenRange(0, 20)]) == (TokenRange(0, 20), TokenRange(0, 2))


# --- states of fixed size ---

STATE, HEAD_DIM, KERNEL = 8, 4, 4
MIXERS = ("model.layers.0.mixer", "model.layers.2.mixer")


def mamba2_ranks(ranks, groups, dim_first=False, guessed=0, padding=192):
    """Ranks with vLLM's own shapes; attention layers take their blocks from the same memory."""
    found = []
    for rank in range(ranks):
        conv, ssm = MambaStateShapeCalculator.mamba2_state_shape(
            ranks, 8 * HEAD_DIM, groups, 8, HEAD_DIM, STATE, KERNEL, guessed
        )
        conv = conv[::-1] if dim_first else conv
        spec = MambaSpec(4096, shapes=(conv, ssm), dtypes=(torch.bfloat16, torch.float32))
        page = spec.page_size_bytes + padding
        spec = replace(spec, page_size_padded=page, num_speculative_blocks=guessed)
        engine = facts(
            (*NAMES, *MIXERS),
            tensor_parallel=ranks,
            tensor_rank=rank,
            num_state_groups=groups,
            conv_dim_first=dim_first,
        )
        found.append(make_rank([(spec, MIXERS), (full(heads=HEADS // ranks), NAMES)], engine))
    return found


def channels_of(groups, ranks, rank):
    """The model's channels that a rank convolves, as vLLM's own weight loader gives them to it."""
    extra = MambaStateShapeCalculator.extra_groups_for_head_shards(groups, ranks)
    inner, shared = 8 * HEAD_DIM, (groups + extra) * STATE
    one = (shared, extra * STATE, extra > 0)
    local = torch.zeros((inner + 2 * shared) // ranks, 1, dtype=torch.long)
    everything = torch.arange(inner + 2 * groups * STATE).view(-1, 1)
    mamba_v2_sharded_weight_loader([(inner, 0, False), one, one], ranks, rank)(local, everything)
    return local.view(-1)


def unpack(rank, name):
    """A page's states as `MambaBase.bind_kv_cache` views them: convolution as (block, channel, width), and ssm."""
    spec = next(g.kv_cache_spec for g in rank.config.kv_cache_groups if name in g.layer_names)
    pages, states, offset = rank.caches[name].squeeze(dim=(1, 2)), [], 0
    for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True):
        num_bytes = prod(shape) * dtype.itemsize
        states.append(pages[:, offset : offset + num_bytes].view(dtype).view(-1, *shape))
        offset += num_bytes
    return states[0] if rank.engine.conv_dim_first else states[0].transpose(1, 2), *states[1:]


def write_mamba2(rank, block, groups):
    engine = rank.engine
    channels = channels_of(groups, engine.tensor_parallel, engine.tensor_rank).view(-1, 1)
    heads = 8 // engine.tensor_parallel
    first = engine.tensor_rank * heads
    for number, name in enumerate(MIXERS):
        conv, ssm = unpack(rank, name)
        conv[block, :, : KERNEL - 1] = (channels * (KERNEL - 1) + torch.arange(KERNEL - 1) + 500 * number).bfloat16()
        every = torch.arange(8 * HEAD_DIM * STATE).view(8, HEAD_DIM, STATE) + 10000 * number
        ssm[block] = every[first : first + heads].float()


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize(("left", "right"), [((1, False), (2, True)), ((2, True), (1, False)), ((2, False), (2, True))])
def test_mamba2_states_between_engines(groups, left, right):
    sources, targets = mamba2_ranks(left[0], groups, left[1]), mamba2_ranks(right[0], groups, right[1], guessed=2)
    expected = mamba2_ranks(right[0], groups, right[1], guessed=2)
    for rank in sources:
        write_mamba2(rank, 3, groups)
    tables = ([(3,), ()], [(5,), ()])
    move(sources, targets, tables, TokenRange(0, 0))
    for rank, wanted in zip(targets, expected, strict=True):
        write_mamba2(wanted, 5, groups)
        for name in MIXERS:
            for found, truth in zip(unpack(rank, name), unpack(wanted, name), strict=True):
                assert torch.equal(found, truth)
    assert torch.equal(channels_of(1, 2, 0)[-2 * STATE :], channels_of(1, 2, 1)[-2 * STATE :])  # copies, indeed


def test_mamba2_states_have_the_names_that_the_catalog_gives_them():
    (rank,) = mamba2_ranks(1, 2)
    states = rank.layout.state_named()
    assert [axis.name for axis in states["model.layers.0.conv.x"].axes] == ["head", "head_dim", "width"]
    assert states["model.layers.2.conv.b"].axes == (Axis("group", 2), Axis("state", STATE), Axis("width", KERNEL - 1))
    assert states["model.layers.2.ssm"].dtype == "float32"
    assert [group.index for group in rank.described.groups] == [0, 1]


def test_groups_that_cannot_be_told_apart_are_refused():
    (rank, _) = mamba2_ranks(2, 1)
    with pytest.raises(LayoutError, match="groups on each of 2 ranks, an unknown number"):
        describe(rank.config, rank.caches, replace(rank.engine, num_state_groups=0))


def make_fixed(kind, shapes, engine, dtypes=(torch.float32, torch.float32)):
    spec = MambaSpec(4096, shapes=shapes, dtypes=dtypes[: len(shapes)], mamba_type=kind)
    return make_rank([(spec, MIXERS)], engine)


@pytest.mark.parametrize("dim_first", [False, True])
def test_other_states_of_fixed_size_lie_where_vllm_unpacks_them(dim_first):
    calculator = MambaStateShapeCalculator
    orient = tuple if not dim_first else lambda shape: tuple(reversed(shape))
    engine = facts(MIXERS, tensor_parallel=2, tensor_rank=1, conv_dim_first=dim_first)
    conv, ssm = calculator.mamba1_state_shape(2, 24, STATE, KERNEL)
    first = make_fixed(Mamba.MAMBA1, (orient(conv), ssm), engine)
    conv, ssm = calculator.gated_delta_net_state_shape(2, 2, 4, 6, 5, KERNEL)
    net = make_fixed(Mamba.GDN_ATTN, (orient(conv), ssm), engine)
    (conv,) = calculator.short_conv_state_shape(2, 16, KERNEL)
    short = make_fixed(Mamba.SHORT_CONV, (orient(conv),), engine)
    starts = {"conv": 12, "conv.q": 0, "conv.k": 6, "conv.v": 12}
    for rank in (first, net, short):
        rank.scramble()
        for placement in rank.layout.placements:
            layer, kind = placement.state[len("model.layers.") :].split(".", 1)
            states, shape = unpack(rank, f"model.layers.{layer}.mixer"), [len(span) for span in placement.spans]
            if kind == "ssm":
                truth = states[1][3].reshape(shape)
            else:
                start = 0 if kind == "conv" else starts[kind]
                size = prod(shape[:-1])
                truth = states[0][3, start : start + size].reshape(shape)
            for _, at, address in element_addresses(rank.layout, placement, [(3,)], TokenRange(0, 0)):
                local = tuple(a - span.start for a, span in zip(at, placement.spans, strict=True))
                found = rank.bytes_at(address, 4)
                assert found == truth[local].contiguous().view(1).view(torch.uint8).numpy().tobytes(), (kind, at)
    assert net.layout.state_named()["model.layers.0.conv.v"].axes[:2] == (Axis("head", 4), Axis("value_dim", 5))
    assert first.layout.placements[0].spans[0] == Span(12, 24)


def test_the_running_state_is_one_block():
    assert _running([0, 0, 7], 0) == _running([0, 0, 7, 8, 9], 2) == (7,)
    assert _running([7], 2) == (7,)
    assert _running([], 2) == ()


# --- names ---


@pytest.mark.parametrize(
    ("name", "prefix"),
    [
        ("model.layers.3.self_attn.attn", "model.layers.3"),
        ("language_model.model.layers.3.self_attn.attn", "model.layers.3"),
        ("model.layers.2.mixer", "model.layers.2"),
        ("model.6.mixer", "model.layers.2"),
        ("model.layers.4.self_attn.attn", "draft.layers.0"),
        ("mtp.layers.1.self_attn.attn", "draft.layers.1"),
        ("draft_model.model.layers.1.self_attn.attn", "draft.layers.1"),
        ("model.layers.1.self_attn.0.attn", "model.layers.1.0"),
    ],
)
def test_names_are_those_of_the_model_whatever_vllm_calls_its_layers(name, prefix):
    rank = make_rank([(full(), (name,))], facts((name,)))
    assert rank.layout.states[0].name == f"{prefix}.k"


DRAFT = ("draft_model.model.layers.0.self_attn.attn",)


def test_a_speculators_layers_may_stay_where_they_are():
    """Then one side may have a speculator and the other none; without being told to leave them, both are named."""
    plain, spoken = make_rank([(full(), NAMES)], facts()), make_rank([(full(), NAMES + DRAFT)], facts(NAMES + DRAFT))
    for pair in ((plain, spoken), (spoken, plain)):
        with pytest.raises(IncompatibleError, match=r"state draft\.layers\.0\.k: only the (source|target) has it"):
            route(*([rank.layout] for rank in pair))
    left = describe(spoken.config, spoken.caches, spoken.engine, draft_layers=False)
    assert {state.name.partition(".")[0] for state in left.layout.states} == {"model"}
    assert route([plain.layout], [left.layout]).legs
    assert left.tables(((1, 2),)) == ((1, 2),)


def test_a_speculators_layers_may_move_if_both_sides_have_them():
    plain, spoken = make_rank([(full(), NAMES)], facts()), make_rank([(full(), NAMES + DRAFT)], facts(NAMES + DRAFT))
    either = describe(spoken.config, spoken.caches, spoken.engine, IF_BOTH).layout
    assert [state.name for state in either.states if state.optional] == ["draft.layers.0.k", "draft.layers.0.v"]
    alone = route([plain.layout], [plain.layout]).legs
    assert len(route([plain.layout], [either]).legs) == len(route([either], [plain.layout]).legs) == len(alone)
    assert len(route([either], [either]).legs) == len(alone) + 2
    assert contents(either) == contents(plain.layout)


def test_a_speculator_that_would_read_recurrent_states_is_not_left_alone():
    state = MambaSpec(16, shapes=((3, 8), (4, 4, 4)), dtypes=(torch.float32,) * 2, mamba_type=Mamba.MAMBA1)
    config = make_rank([(full(), NAMES + DRAFT)], facts(NAMES + DRAFT))
    mixed = replace(config.config, kv_cache_groups=[*config.config.kv_cache_groups, KVCacheGroupSpec([], state)])
    assert mixed.needs_kv_cache_zeroing
    with pytest.raises(LayoutError, match=r"may be no numbers.*hint: leave transfer_draft_layers out"):
        describe(mixed, config.caches, config.engine, draft_layers=False)


# --- refusals ---


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (full(kind=SinkFullAttentionSpec, sink_len=4), "SinkFullAttentionSpec.*kind of cache is not supported"),
        (full(kind=CrossAttentionSpec), "CrossAttentionSpec.*kind of cache is not supported"),
        (full(kv_quant_mode=KVQuantMode.INT8_PER_TOKEN_HEAD), "its quantisation scales are stored outside the cache"),
        (full(tokens_per_state=2), "several tokens"),
        (full(num_head_slots=8), "packs heads"),
        (
            MambaSpec(16, shapes=((3, 4), (2, 2)), dtypes=(torch.float32,) * 2, mamba_type=Mamba.LINEAR),
            "kind of state is not supported",
        ),
        (MambaSpec(16, shapes=((3, 4),) * 5, dtypes=(torch.float32,) * 5), "ReplaySSM"),
    ],
)
def test_what_cannot_be_described_is_refused_with_layer_and_specification(spec, words):
    with pytest.raises(LayoutError, match=words) as error:
        make_rank([(spec, NAMES[:1])], facts())
    assert NAMES[0] in str(error.value)
    assert type(spec).__name__ in str(error.value)


def test_a_cache_of_eight_bits_and_one_of_the_models_own_are_refused_with_both():
    plain = make_rank([(full(), NAMES)], facts())
    spec = replace(full(kv_quant_mode=KVQuantMode.FP8_PER_TENSOR), dtype=torch.uint8)
    short = make_rank([(spec, NAMES)], facts(cache_dtype="fp8"))
    words = r"dtype float32 at the source, float8_e4m3fn at the target.*hint: .*the same cache dtype"
    with pytest.raises(IncompatibleError, match=words):
        route([plain.layout], [short.layout])


def test_keys_of_longrope_that_other_factors_turn_are_refused():
    short, long = (make_rank([(full(), NAMES)], facts(long_factors=is_long)) for is_long in (False, True))
    for pair in ((short, long), (long, short)):
        with pytest.raises(
            IncompatibleError, match=r"state model\.layers\.0\.long\.k: only the (source|target) has it"
        ):
            route(*([rank.layout] for rank in pair))
    route([long.layout], [long.layout])


@pytest.mark.parametrize("max_model_len", [64, 65])
def test_the_factors_of_longrope_are_those_that_vllm_has_chosen(max_model_len, monkeypatch):
    config = SimpleNamespace(model_config=SimpleNamespace(max_model_len=max_model_len))
    monkeypatch.setattr(phi3_long_rope_scaled_rope, "get_current_vllm_config", lambda: config)
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 64, **factors}
    with patch.dict(_ROPE_DICT, clear=True):
        assert not has_long_factors()
        get_rope(16, 1024, rope_parameters=rope)
        assert has_long_factors() == (max_model_len > 64)


def test_scales_that_every_engine_computes_are_refused():
    spec = replace(full(kv_quant_mode=KVQuantMode.FP8_PER_TENSOR), dtype=torch.uint8)
    rank = make_rank([(spec, NAMES)], facts(cache_dtype="fp8_e4m3"))
    assert rank.layout.states[0].dtype == "float8_e4m3fn"
    with pytest.raises(LayoutError, match="compute its own scales"):
        make_rank([(spec, NAMES)], facts(cache_dtype="fp8_e4m3", dynamic_scales=True))
    with pytest.raises(LayoutError, match="1 heads on each of 2 ranks, 3 in the model"):
        make_rank([(full(heads=1), NAMES)], facts(tensor_parallel=2, num_heads=3))
