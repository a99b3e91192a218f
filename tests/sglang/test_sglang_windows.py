"""Windows of a prompt that SGLang keeps for its readers, in its own pool, allocator and prefix cache: other prompts get
none of the pages that a lease names."""

from __future__ import annotations

from array import array
from types import SimpleNamespace

import pytest
from described_pools import HEAD_DIM, NUM_HEADS, described

NUM_SLOTS, NUM_WINDOW_SLOTS = 1024, 256

# Whatever a test imports of SGLang first, its warnings are dealt with before.
pytestmark = pytest.mark.usefixtures("sglang_pools")


class Prefill:
    """What a scheduler has of windows, with one prompt whose tokens are computed and in the prefix cache."""

    def __init__(self, page_size: int, window_tokens: int, num_tokens: int) -> None:
        import sglang_pages
        import torch
        from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams
        from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
        from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
        from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
        from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

        sglang_pages.register()
        self.page_size, self.num_seen_before, self.num_tokens = page_size, window_tokens - 1, num_tokens
        layers = {"swa_attention_layer_ids": [0], "full_attention_layer_ids": [1]}
        heads = {"dtype": torch.float32, "head_num": NUM_HEADS, "head_dim": HEAD_DIM}
        sizes = {"size": NUM_SLOTS, "size_swa": NUM_WINDOW_SLOTS, "page_size": page_size}
        self.pool = SWAKVPool(**sizes, **heads, **layers, device="cpu")
        self.token_to_kv_pool_allocator = SWATokenToKVPoolAllocator(
            NUM_SLOTS, NUM_WINDOW_SLOTS, page_size, torch.float32, "cpu", self.pool, False
        )
        self._rows = ReqToTokenPool(1, NUM_SLOTS, "cpu", False)
        self._cache = UnifiedRadixCache(
            CacheInitParams(
                disable=False,
                req_to_token_pool=self._rows,
                token_to_kv_pool_allocator=self.token_to_kv_pool_allocator,
                page_size=page_size,
                sliding_window_size=self.num_seen_before,
                tree_components=(ComponentType.FULL, ComponentType.SWA),
            )
        )
        self._compute()

    def _compute(self) -> None:
        """As the forward of a request and what its scheduler does with the result."""
        from sglang.srt.managers.schedule_batch import ReqKvInfo
        from sglang.srt.mem_cache import common
        from sglang.srt.mem_cache.base_prefix_cache import DecLockRefParams, MatchPrefixParams
        from sglang.srt.mem_cache.radix_cache import RadixKey

        # As SGLang 0.5.22 and 0.5.21 call it.
        publish = getattr(common, "checkpoint_kv_cache", None) or common.maybe_cache_unfinished_req
        tokens = array("q", range(10, 10 + self.num_tokens))
        named = dict.fromkeys(("session", "session_id", "kv_rotation_base", "extra_key", "cache_salt"))
        cached = dict.fromkeys(("swa_branching_seqlen", "lock", "cache_request_handle"))
        request = SimpleNamespace(
            rid="a",
            kv=ReqKvInfo(),
            priority=0,
            full_untruncated_fill_ids=tokens,
            origin_input_ids=tokens,
            output_ids=array("q"),
            finished=lambda: False,
            skip_radix_cache_insert=False,
            extend_end=self.num_tokens,
            prefix_len=0,
            swa_prefix_lock_released=False,
            lock_receipt=DecLockRefParams(),
            last_node=self._cache.match_prefix(MatchPrefixParams(key=RadixKey(tokens))).last_device_node,
            get_fill_ids=lambda: tokens,
            **named,
            **cached,
        )
        self._rows.alloc([request])
        self._rows.write((request.kv.req_pool_idx, slice(0, self.num_tokens)), self._allocate())
        request.kv.kv_allocated_len = request.kv.kv_committed_len = self.num_tokens
        publish(request, self._cache)
        self._row = self._rows.req_to_token[request.kv.req_pool_idx]

    def _allocate(self):
        import torch

        if self.page_size == 1:
            return self.token_to_kv_pool_allocator.alloc(self.num_tokens)
        none, all_of_them = torch.tensor([0]), torch.tensor([self.num_tokens])
        return self.token_to_kv_pool_allocator.alloc_extend(
            prefix_lens=none,
            prefix_lens_cpu=none,
            seq_lens=all_of_them,
            seq_lens_cpu=all_of_them,
            last_loc=torch.tensor([-1]),
            extend_num_tokens=self.num_tokens,
        )

    @property
    def tables(self):
        """The tables of the lease, and the number that stands for a page that is not kept."""
        from kvferry.connectors.sglang.description.tables import Tables

        found = described(self.pool, num_window_heads=NUM_HEADS, window_tokens=self.num_seen_before + 1)
        # As SGLang's scheduler lists the pages of a window.
        start = max(0, self.num_tokens - self.num_seen_before) // self.page_size * self.page_size
        slots = self._row[start : self.num_tokens]
        slots = self.token_to_kv_pool_allocator.translate_swa_indices_for_transfer(slots)
        states = [(slots[:: self.page_size] // self.page_size).numpy()]
        pages = (self._row[: self.num_tokens : self.page_size] // self.page_size).tolist()
        tables = Tables(found, ("swa",), self).of_prompt(self.num_tokens, pages, states)
        return tables, found.components[1].group.num_blocks

    def pages_of_others(self) -> set[int]:
        """The pages of windows that other prompts may have, when they need as many as they can get."""
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams

        self._cache.evict(EvictParams(num_tokens=0, swa_num_tokens=NUM_WINDOW_SLOTS))
        allocator = self.token_to_kv_pool_allocator.swa_attn_allocator
        # Some allocators put pages that come back aside, to sort them later.
        lists = filter(lambda each: each is not None, (allocator.free_pages, allocator.release_pages))
        return {int(page) for each in lists for page in each}


@pytest.mark.parametrize(("page_size", "window_tokens"), [(1, 40), (16, 64), (16, 49), (64, 65)])
def test_no_page_that_a_lease_names_is_another_prompts(page_size, window_tokens):
    for num_tokens in (39, 40, 41, 63, 64, 65, 127, 128, 129, 144, 192):
        prefill = Prefill(page_size, window_tokens, num_tokens)
        (_, windows), nowhere = prefill.tables
        # What a reader of all tokens sees is always there.
        first = max(0, num_tokens - (window_tokens - 1)) // page_size
        assert (num_tokens, nowhere in windows[first:]) == (num_tokens, False)
        assert (num_tokens, prefill.pages_of_others() & {*windows}) == (num_tokens, set())


@pytest.mark.parametrize(("page_size", "window_tokens"), [(16, 64), (16, 50), (64, 64)])
def test_a_reader_of_one_token_less_has_its_window_in_pages_of_several_tokens(page_size, window_tokens):
    for num_tokens in range(128, 128 + page_size, page_size // 16):
        (_, windows), nowhere = Prefill(page_size, window_tokens, num_tokens).tables
        first = (num_tokens - window_tokens) // page_size
        assert (num_tokens, nowhere in windows[first:]) == (num_tokens, False)


@pytest.mark.parametrize(("page_size", "window_tokens"), [(1, 40), (16, 49), (64, 65)])
def test_a_page_that_sglang_keeps_for_nobody_is_not_named(page_size, window_tokens):
    """That of the first token which a reader of one token less sees, where the window behind it begins with a page."""
    (_, windows), nowhere = Prefill(page_size, window_tokens, 192).tables
    first = (192 - window_tokens) // page_size
    assert (windows[first], nowhere in windows[first + 1 :]) == (nowhere, False)
