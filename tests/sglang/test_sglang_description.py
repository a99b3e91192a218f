"""A described pool: elements lie where SGLang's own index arithmetic finds them, at any page size and parallelism."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
from described_pools import (
    HEAD_DIM,
    LATENT_DIM,
    NUM_HEADS,
    NUM_LAYERS,
    NUM_PAGES,
    WINDOW_LAYERS,
    WINDOW_TOKENS,
    attention_pool,
    described,
    latent_pool,
    window_pool,
)

from kvferry.errors import LayoutError
from kvferry.layout import Layout

TABLE = (3, 1, 4)
NOWHERE = 2 * NUM_PAGES + 1

# Whatever a test imports of SGLang first, its warnings are dealt with before.
pytestmark = pytest.mark.usefixtures("sglang_pools")


def layout_of(pool, rank=0, ranks=1, num_heads=NUM_HEADS, **more) -> Layout:
    found = described(pool, rank, ranks, num_heads, **more)
    layout = found.layout
    assert [(m.address, m.size_bytes) for m in found.memories] == [(r.address, r.size_bytes) for r in layout.regions]
    return layout


def address_of(layout: Layout, state: str, token: int, head: int | None) -> int:
    """Where the first element of a token (and head) lies, by our description alone."""
    placement = next(each for each in layout.placements if each.state == state)
    group = layout.groups[placement.group]
    block, slot = TABLE[token // group.block_tokens], token % group.block_tokens
    address = layout.regions[placement.region].address + placement.offset
    address += block * placement.block_stride + slot * placement.token_stride
    if head is not None:
        address += (head - placement.spans[0].start) * placement.strides[0]
    return address


def slot_of(token: int, page_size: int) -> int:
    """SGLang's own: a request's slots are those of its pages."""
    return TABLE[token // page_size] * page_size + token % page_size


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize(("rank", "ranks"), [(0, 1), (0, 2), (1, 2), (3, 4), (5, 8)])
def test_keys_and_values_lie_where_sglang_looks_for_them(sglang_pools, dtype, page_size, rank, ranks):
    local = max(1, NUM_HEADS // ranks)
    pool = attention_pool(sglang_pools, page_size, local, dtype)
    layout = layout_of(pool, rank, ranks)
    first = rank * NUM_HEADS // ranks
    assert [state.name for state in layout.states[:2]] == ["model.layers.0.k", "model.layers.0.v"]
    for layer in range(NUM_LAYERS):
        for kind, rows in (("k", pool.get_key_buffer(layer)), ("v", pool.get_value_buffer(layer))):
            for token in range(len(TABLE) * page_size):
                for head in range(local):
                    expected = rows[slot_of(token, page_size), head].data_ptr()
                    assert address_of(layout, f"model.layers.{layer}.{kind}", token, first + head) == expected


@pytest.mark.parametrize("page_size", [1, 16])
def test_latent_rows_are_the_same_on_every_rank(sglang_pools, page_size):
    pool = latent_pool(sglang_pools, page_size)
    layout = layout_of(pool, rank=1, ranks=2)
    for layer in range(NUM_LAYERS):
        for token in range(len(TABLE) * page_size):
            expected = pool.kv_buffer[layer][slot_of(token, page_size)].data_ptr()
            assert address_of(layout, f"model.layers.{layer}.latent", token, None) == expected
    assert layout.states[0].axes[0].extent == LATENT_DIM


def test_pages_are_those_that_sglang_registers(sglang_pools):
    """Its own backends find page `p` of a buffer at `ptr + p * item_len`."""
    pool = attention_pool(sglang_pools, 16, NUM_HEADS, "float32")
    layout = layout_of(pool)
    pointers, lengths, item_lengths = pool.get_contiguous_buf_infos()
    places = [f"model.layers.{layer}.{kind}" for kind in "kv" for layer in range(NUM_LAYERS)]
    for state, pointer, length, item_length in zip(places, pointers, lengths, item_lengths, strict=True):
        for block, page in enumerate(TABLE):
            assert address_of(layout, state, 16 * block, 0) == pointer + page * item_length
        assert layout.groups[0].num_blocks * item_length == length


def test_bytes_written_through_sglang_are_found_by_the_description(sglang_pools):
    import torch

    pool = attention_pool(sglang_pools, 4, NUM_HEADS, "float32")
    layout = layout_of(pool)
    slots = torch.tensor([slot_of(token, 4) for token in range(12)])
    rows = torch.arange(12 * NUM_HEADS * HEAD_DIM, dtype=torch.float32).reshape(12, NUM_HEADS, HEAD_DIM)
    pool.get_key_buffer(1)[slots] = rows
    for token in range(12):
        address = address_of(layout, "model.layers.1.k", token, 2)
        found = np.ctypeslib.as_array((np.ctypeslib.ctypes.c_float * HEAD_DIM).from_address(address))
        assert found.tolist() == rows[token, 2].tolist()


class TestRefused:
    def test_a_pool_of_another_kind(self):
        pool = SimpleNamespace(page_size=16)
        with pytest.raises(LayoutError, match="this kind of pool cannot be described"):
            described(pool)

    def test_heads_that_are_not_divided_evenly(self, sglang_pools):
        pool = attention_pool(sglang_pools, 16, 3, "float32")
        with pytest.raises(LayoutError, match="not divided evenly"):
            described(pool, rank=0, ranks=2)

    def test_a_pool_in_which_sglang_keeps_more(self, sglang_pools):
        pool = attention_pool(sglang_pools, 16, NUM_HEADS, "float32")
        args = registered(pool)
        described(pool).check_complete(args)
        args.kv_data_ptrs.append(1)
        with pytest.raises(LayoutError, match="more of a request than kvferry can move") as refused:
            described(pool).check_complete(args)
        assert refused.value.found == "keys and values"

    @pytest.mark.parametrize("kind", ["mamba", "swa", "block_scale"])
    def test_a_state_beside_the_pool(self, sglang_pools, kind):
        pool = attention_pool(sglang_pools, 16, NUM_HEADS, "float32")
        with pytest.raises(LayoutError, match="more of a request than kvferry can move") as refused:
            described(pool).check_complete(registered(pool, (kind, [4096])))
        assert refused.value.found == kind


def registered(pool, *states):
    """What SGLang's own backends are told of a pool."""
    return SimpleNamespace(
        kv_data_ptrs=list(pool.get_contiguous_buf_infos()[0]),
        state_types=[SimpleNamespace(value=kind) for kind, _ in states],
        state_data_ptrs=[list(addresses) for _, addresses in states],
    )


class TestWindows:
    """A pool with a part for layers whose tokens see a window, which is addressed by pages of its own."""

    def described(self, pool, rank=0, ranks=1, window_heads=NUM_HEADS):
        return described(pool, rank, ranks, num_window_heads=window_heads, window_tokens=WINDOW_TOKENS)

    @pytest.mark.parametrize("page_size", [1, 16])
    @pytest.mark.parametrize(("rank", "ranks"), [(0, 1), (1, 2)])
    def test_rows_lie_where_sglang_looks_for_them(self, page_size, rank, ranks):
        pool = window_pool(page_size, NUM_HEADS // ranks, 2 * NUM_HEADS // ranks)
        layout = self.described(pool, rank, ranks, 2 * NUM_HEADS).layout
        for layer in range(6):
            local = (2 * NUM_HEADS if layer in WINDOW_LAYERS else NUM_HEADS) // ranks
            for kind, rows in (("k", pool.get_key_buffer(layer)), ("v", pool.get_value_buffer(layer))):
                for token in range(len(TABLE) * page_size):
                    expected = rows[slot_of(token, page_size), local - 1].data_ptr()
                    head = rank * local + local - 1
                    assert address_of(layout, f"model.layers.{layer}.{kind}", token, head) == expected

    def test_layers_of_a_window_have_a_table_of_their_own(self):
        layout = self.described(window_pool()).layout
        assert [group.num_blocks for group in layout.groups] == [NUM_PAGES + 1, 2 * NUM_PAGES + 1]
        windows = {state.name: state.window_tokens for state in layout.states}
        groups = {placement.state: placement.group for placement in layout.placements}
        for layer in range(6):
            seen = (WINDOW_TOKENS, 1) if layer in WINDOW_LAYERS else (0, 0)
            assert (windows[f"model.layers.{layer}.v"], groups[f"model.layers.{layer}.v"]) == seen

    def test_it_is_all_that_sglang_registers(self):
        pool = window_pool()
        self.described(pool).check_complete(registered(pool, ("swa", pool.get_state_buf_infos()[0])))
        with pytest.raises(LayoutError, match="more of a request"):
            self.described(pool).check_complete(registered(pool))

    def test_windows_that_each_request_keeps_by_itself_are_refused(self):
        pool = window_pool()
        pool.request_window = SimpleNamespace()
        with pytest.raises(LayoutError, match="how many tokens its layers see"):
            self.described(pool)

    def test_a_window_of_unknown_width_is_refused(self):
        with pytest.raises(LayoutError, match="how many tokens its layers see"):
            described(window_pool(), num_window_heads=NUM_HEADS)


class TestIndexer:
    """The keys of a sparse-attention indexer, and their scales behind them in the same page."""

    def pool(self, kpool=1, page_size=64):
        import torch
        from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool

        return DSATokenToKVPool(
            size=NUM_PAGES * 64,
            page_size=page_size,
            kv_lora_rank=LATENT_DIM - 8,
            dtype=torch.bfloat16,
            qk_rope_head_dim=8,
            layer_num=NUM_LAYERS,
            device="cpu",
            index_head_dim=128,
            index_buf_size=NUM_PAGES * 64,
            enable_memory_saver=False,
            kv_cache_dim=LATENT_DIM,
            index_kpool=kpool,
            skip_topk_layers=[False, True, False],
        )

    def test_keys_and_scales_lie_where_sglang_looks_for_them(self):
        pool = self.pool()
        layout = layout_of(pool)
        for layer in (0, 2):
            pages = pool.index_k_with_scale_buffer[layer]
            for token in range(len(TABLE) * 64):
                # As its own `IndexKeyCache.move` finds them.
                page, slot = TABLE[token // 64], token % 64
                keys = pages[:, : 64 * 128].view(pages.shape[0], 64, -1)
                scales = pages[:, 64 * 128 :].view(pages.shape[0], 64, -1)
                prefix = f"model.layers.{layer}.indexer"
                assert address_of(layout, f"{prefix}.k", token, None) == keys[page, slot].data_ptr()
                assert address_of(layout, f"{prefix}.scale", token, None) == scales[page, slot].data_ptr()
        names = [state.name for state in layout.states]
        assert not [name for name in names if name.startswith("model.layers.1.indexer")]

    def test_they_have_the_pages_of_the_latents(self):
        pool = self.pool()
        found = described(pool)
        assert len(found.layout.groups) == 1
        found.check_complete(registered(pool, ("dsa", pool.get_state_buf_infos()[0])))

    def test_a_key_for_several_tokens_is_refused(self):
        with pytest.raises(LayoutError, match="not kept token by token"):
            described(self.pool_of_two())

    def pool_of_two(self):
        """Some versions of SGLang want a page of 64 tokens, others one of 64 keys."""
        try:
            return self.pool(kpool=2, page_size=128)
        except AssertionError:
            return self.pool(kpool=2)


class TestStates:
    """States of fixed size: a slot of each layer's tensors for each request."""

    LAYERS, SLOTS = (0, 1, 3), 5
    MAMBA: ClassVar = {"intermediate_size": 64, "num_heads": 8, "head_dim": 8, "state_size": 4, "conv_kernel": 4}

    def pool(self, shape):
        import torch
        from sglang.srt.configs import mamba_utils
        from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool, MambaPool

        kinds = mamba_utils.Mamba2StateDType(conv=torch.bfloat16, temporal=torch.float32)
        is_kimis = isinstance(shape, mamba_utils.KimiLinearStateShape)
        params = mamba_utils.KimiLinearCacheParams if is_kimis else mamba_utils.Mamba2CacheParams
        states = MambaPool(
            size=self.SLOTS,
            spec_state_size=1,
            cache_params=params(shape=shape, layers=list(self.LAYERS), dtype=kinds),
            mamba_layer_ids=list(self.LAYERS),
            device="cpu",
        )
        return HybridLinearKVPool(
            size=NUM_PAGES * 16,
            dtype=torch.float32,
            page_size=16,
            head_num=NUM_HEADS,
            head_dim=HEAD_DIM,
            full_attention_layer_ids=[2],
            device="cpu",
            mamba_pool=states,
        )

    def mamba(self, ranks, groups, **more):
        from sglang.srt.configs.mamba_utils import Mamba2StateShape

        return Mamba2StateShape.create(tp_world_size=ranks, n_groups=groups, **self.MAMBA, **more)

    def element(self, found, name, slot, index):
        """The address of an element of a state, numbered over all ranks, by our description alone."""
        layout = found.layout
        placement = layout.placement_of()[name]
        inside = zip(index, placement.spans, placement.strides, strict=True)
        offset = placement.offset + slot * placement.block_stride
        offset += sum((at - span.start) * stride for at, span, stride in inside)
        return layout.regions[placement.region].address + offset

    @pytest.mark.parametrize(("rank", "ranks", "groups"), [(0, 1, 2), (1, 2, 2), (1, 2, 1)])
    def test_mambas_projections_and_states_lie_where_its_kernels_look(self, rank, ranks, groups):
        pool = self.pool(self.mamba(ranks, groups))
        found = described(pool, rank, ranks, num_heads=NUM_HEADS * ranks, num_state_groups=groups)
        (conv,), temporal = pool.mamba_pool.mamba_cache.conv, pool.mamba_pool.mamba_cache.temporal
        heads, x = 8 // ranks, 64 // ranks
        b = max(1, groups // ranks) * 4
        copies = ranks if groups > 1 else 1
        for number, layer in enumerate(self.LAYERS):
            prefix = f"model.layers.{layer}"
            for name, first, size, parts in (("0", 0, x, ranks), ("1", x, b, copies), ("2", x + b, b, copies)):
                start = rank * size if parts > 1 else 0
                for channel in range(size):
                    expected = conv[number, 3, first + channel, 2].data_ptr()
                    assert self.element(found, f"{prefix}.conv.{name}", 3, (start + channel, 2)) == expected
                extent = found.layout.state_named()[f"{prefix}.conv.{name}"].axes[0].extent
                assert extent == size * parts
            expected = temporal[number, 3, 1, 5, 2].data_ptr()
            assert self.element(found, f"{prefix}.ssm", 3, (rank * heads + 1, 5, 2)) == expected

    @pytest.mark.parametrize(("rank", "ranks"), [(0, 1), (1, 2)])
    def test_queries_keys_and_values_of_a_delta_net_are_divided_each_by_itself(self, rank, ranks):
        from sglang.srt.configs.mamba_utils import Mamba2StateShape

        blocks = [16, 16, 32]
        shape = Mamba2StateShape.create(
            tp_world_size=ranks,
            intermediate_size=32,
            n_groups=4,
            num_heads=8,
            head_dim=4,
            state_size=4,
            conv_kernel=4,
            conv_shard_groups=blocks,
        )
        pool = self.pool(shape)
        found = described(pool, rank, ranks, num_heads=NUM_HEADS * ranks)
        (conv,), first = pool.mamba_pool.mamba_cache.conv, 0
        for number, total in enumerate(blocks):
            local = total // ranks
            for channel in range(local):
                expected = conv[2, 1, first + channel, 0].data_ptr()
                name = f"model.layers.3.conv.{number}"
                assert self.element(found, name, 1, (rank * local + channel, 0)) == expected
            first += local

    @pytest.mark.parametrize(("rank", "ranks"), [(0, 1), (1, 2)])
    def test_kimis_convolutions_are_kept_input_by_input(self, rank, ranks):
        from sglang.srt.configs.mamba_utils import KimiLinearStateShape

        shape = KimiLinearStateShape.create(tp_world_size=ranks, num_heads=4, head_dim=8, num_k_heads=2, head_k_dim=8)
        pool = self.pool(shape)
        found = described(pool, rank, ranks, num_heads=NUM_HEADS * ranks)
        (conv,), first = pool.mamba_pool.mamba_cache.conv, 0
        assert conv.shape[2:] == (3, 64 // ranks)
        for number, total in enumerate((32, 16, 16)):
            local, name = total // ranks, f"model.layers.1.conv.{number}"
            for channel in range(local):
                expected = conv[1, 4, 2, first + channel].data_ptr()
                assert self.element(found, name, 4, (rank * local + channel, 2)) == expected
            assert [axis.extent for axis in found.layout.state_named()[name].axes] == [total, 3]
            first += local
        found.check_complete(registered(pool, ("mamba", pool.get_state_buf_infos()[0])))

    @pytest.mark.parametrize(("rank", "ranks"), [(0, 1), (1, 2)])
    def test_a_layer_that_only_convolves_has_one_state(self, rank, ranks):
        shape = replace(self.mamba(1, 2), conv=[(16 // ranks, 2)], temporal=(0, 0, 0))
        pool = self.pool(shape)
        found = described(pool, rank, ranks, num_heads=NUM_HEADS * ranks)
        (conv,) = pool.mamba_pool.mamba_cache.conv
        name, local = "model.layers.3.conv.0", 16 // ranks
        for channel in range(local):
            expected = conv[2, 1, channel, 1].data_ptr()
            assert self.element(found, name, 1, (rank * local + channel, 1)) == expected
        assert [state.name for state in found.layout.states if state.name.startswith("model.layers.3.")] == [name]
        found.check_complete(registered(pool, ("mamba", pool.get_state_buf_infos()[0])))

    def test_channels_that_ranks_share_unevenly_are_refused(self):
        shape = replace(self.mamba(1, 2), conv_shard_groups=[40, 39])
        with pytest.raises(LayoutError, match="channels of its convolutions are not divided evenly"):
            described(self.pool(shape), num_state_groups=2)

    def test_it_is_all_that_sglang_registers(self):
        pool = self.pool(self.mamba(1, 2))
        found = described(pool, num_state_groups=2)
        found.check_complete(registered(pool, ("mamba", pool.get_state_buf_infos()[0])))
        assert [group.num_blocks for group in found.layout.groups] == [NUM_PAGES + 1, self.SLOTS + 1]
        assert [state.per_token for state in found.layout.states][:2] == [True, True]
        assert not any(state.per_token for state in found.layout.states[2:])

    def test_states_in_a_pool_of_another_kind_are_refused(self):
        pool = self.pool(self.mamba(1, 2))
        pool.mamba_pool = SimpleNamespace()
        with pytest.raises(LayoutError, match="this kind of pool cannot be described"):
            described(pool, num_state_groups=2)

    def test_groups_that_ranks_share_unevenly_are_refused(self):
        with pytest.raises(LayoutError, match="not divided evenly"):
            described(self.pool(self.mamba(4, 2)), 1, 4, num_heads=4 * NUM_HEADS, num_state_groups=2)


class TestTables:
    """Block tables from the lists that SGLang's scheduler makes."""

    def tables(self, pool, *kinds, scheduler=None, **facts):
        from kvferry.connectors.sglang.description.tables import Tables

        return Tables(described(pool, **facts), kinds, scheduler)

    def windows(self, mapping):
        """`mapping` is SGLang's, from slots of all tokens to those of windows."""
        import torch

        pool = window_pool()
        translate = lambda found: torch.tensor(mapping)[found]  # noqa: E731
        allocator = SimpleNamespace(translate_swa_indices_for_transfer=translate, device="cpu")
        scheduler = SimpleNamespace(token_to_kv_pool_allocator=allocator)
        facts = {"num_window_heads": NUM_HEADS, "window_tokens": WINDOW_TOKENS}
        return self.tables(pool, "swa", scheduler=scheduler, **facts)

    def test_a_pool_of_keys_and_values_has_one_table_which_may_grow(self, sglang_pools):
        tables = self.tables(attention_pool(sglang_pools, 16, NUM_HEADS, "float32"))
        assert (tables.may_grow, tables.nowhere) == (True, ((),))
        assert tables.of([3, 1], []) == tables.of_prompt(20, [3, 1], None) == ((3, 1),)

    def test_a_window_has_the_last_pages(self):
        tables = self.windows([0] * 200)
        assert (tables.may_grow, tables.nowhere) == (False, ((), ()))
        assert tables.of([3, 1, 4, 5], [np.array([7, 9])]) == ((3, 1, 4, 5), (NOWHERE, NOWHERE, 7, 9))

    @pytest.mark.parametrize(("num_tokens", "second"), [(71, 6), (72, NOWHERE)])
    def test_a_reader_of_one_token_less_sees_one_more_of_the_window(self, num_tokens, second):
        """Behind token 70 they see tokens from 32 on, token 70 itself those from 31 on, which are a page more."""
        mapping = [0] * 200
        mapping[32] = 6 * 16
        tables = self.windows(mapping).of_prompt(num_tokens, [1, 2, 3, 4, 5], [np.array([7, 9, 8])])
        assert tables == ((1, 2, 3, 4, 5), (NOWHERE, second, 7, 9, 8))

    def test_a_token_that_has_left_the_window_has_no_page(self):
        tables = self.windows([0] * 200).of_prompt(71, [1, 2, 3, 4, 5], [np.array([7, 9, 8])])
        assert tables[1][:2] == (NOWHERE, NOWHERE)

    def test_a_prompt_that_fits_into_the_window_has_all_its_pages(self):
        tables = self.windows([0] * 200).of_prompt(40, [1, 2, 3], [np.array([7, 9, 8])])
        assert tables[1] == (7, 9, 8)

    def test_states_have_one_slot(self):
        states = TestStates()
        tables = self.tables(states.pool(states.mamba(1, 2)), "mamba", num_state_groups=2)
        assert tables.of([3, 1], [[np.array([4])]]) == ((3, 1), (4,))
