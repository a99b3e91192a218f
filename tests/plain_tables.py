"""Stands for the block tables of an SGLang pool that keeps every token, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence

from kvferry.connectors.jobs import BlockTables

__all__ = ["PlainTables"]


class PlainTables:
    """One table, which may grow."""

    may_grow = True

    def of(self, pages: Sequence[int], states: object) -> BlockTables:
        return (tuple(pages),)

    def of_prompt(self, num_tokens: int, pages: Sequence[int], states: object) -> BlockTables:
        return self.of(pages, states)
