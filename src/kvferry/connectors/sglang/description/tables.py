"""Block tables from what SGLang's scheduler hands to a backend: pages of a request, and a list for each state."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kvferry.connectors.jobs import BlockTables
from kvferry.connectors.sglang.description.describe import Described
from kvferry.connectors.sglang.description.parts import Component


@dataclass(frozen=True, slots=True)
class Tables:
    """Makes block tables. `kinds` are SGLang's `state_types`, in its order. `scheduler` says where tokens lie."""

    described: Described
    kinds: tuple[str, ...]
    scheduler: Any = None

    @property
    def nowhere(self) -> BlockTables:
        """The block tables of a request that has no pages yet."""
        return self.described.nowhere

    @property
    def may_grow(self) -> bool:
        """Whether what is computed of a prompt may be read while the rest is computed: SGLang names the pages of
        windows and the slots of states only with the last token."""
        return len(self.described.components) == 1

    def of(self, pages: Sequence[int], states: Sequence[Any] | None) -> BlockTables:
        """One table for each group: the first has all pages, from that of token 0 on, the others are SGLang's lists."""
        tables = [tuple(pages)]
        for component in self.described.components[1:]:
            found = _integers((states or ())[self.kinds.index(component.kind)])
            if component.window_tokens:
                # The list has the last pages. No block has the number of the others.
                found = (component.group.num_blocks,) * (len(pages) - len(found)) + found
            tables.append(found)
        return tuple(tables)

    def of_prompt(self, num_tokens: int, pages: Sequence[int], states: Sequence[Any] | None) -> BlockTables:
        """Return the tables of a prompt that is computed here. SGLang's lists serve a reader that goes on behind the
        last token. One that computes that token itself sees one token more of a window, which may be kept as well."""
        tables = list(self.of(pages, states))
        for number, component in enumerate(self.described.components):
            first = max(0, num_tokens - component.window_tokens) // component.group.block_tokens
            is_left_out = component.window_tokens and tables[number][first] == component.group.num_blocks
            if is_left_out and first >= _first_kept(component, num_tokens):
                page = self._window_page(component, pages[first])
                tables[number] = (*tables[number][:first], page, *tables[number][first + 1 :])
        return tuple(tables)

    def _window_page(self, component: Component, page: int) -> int:
        """The page that a window's layers have for a page of the request."""
        page_size, allocator = component.group.block_tokens, self.scheduler.token_to_kv_pool_allocator
        slot = torch.tensor([page * page_size], device=allocator.device)
        found = allocator.translate_swa_indices_for_transfer(slot)
        # Page 0 is for padding: the token has left the window.
        return int(found[0]) // page_size or component.group.num_blocks


def _first_kept(component: Component, num_tokens: int) -> int:
    """The first page of a window that is nobody else's before SGLang gives the request's pages back. Its prefix cache
    has the whole pages of the prompt, and locks what a token behind those sees: other prompts get what lies before."""
    page_size = component.group.block_tokens
    num_cached = num_tokens // page_size * page_size
    return max(0, num_cached - (component.window_tokens - 1)) // page_size


def _integers(indices: Iterable[Any]) -> tuple[int, ...]:
    """Return the numbers in one of SGLang's lists, which is an array or a list of arrays."""
    return tuple(int(index) for each in indices for index in np.ravel(each))
