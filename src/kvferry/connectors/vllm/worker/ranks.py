"""The ranks of one engine, which introduce themselves to each other when it starts."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import torch
from vllm.distributed.parallel_state import get_world_group

from kvferry.layout import Layout


@dataclass(frozen=True, slots=True)
class Introduction:
    """What every rank tells all others of its engine when it starts."""

    epoch: str
    layout: Layout


def meet(ours: Introduction, num_ranks: int) -> tuple[list[Introduction], int]:
    """What all ranks of this engine say, in their order, and which one we are."""
    words, rank = _gather(msgspec.msgpack.encode(ours), num_ranks)
    return [msgspec.msgpack.decode(word, type=Introduction) for word in words], rank


def addresses(ours: str, num_ranks: int) -> list[str]:
    """Where the agents of all ranks listen, in their order: who knows one of them, as in a room, is told of all."""
    words, _ = _gather(ours.encode(), num_ranks)
    return [word.decode() for word in words]


def _gather(word: bytes, num_ranks: int) -> tuple[list[bytes], int]:
    world = get_world_group()
    if world.world_size == 1:
        return [word], 0
    words: list[bytes] = [b""] * world.world_size
    # Among the processes of one engine, over vLLM's own group: nothing of this comes from a network peer.
    torch.distributed.all_gather_object(words, word, group=world.cpu_group)
    # Replicas of data parallelism may be in the same group; each is an engine of its own.
    first = world.rank_in_group // num_ranks * num_ranks
    return words[first : first + num_ranks], world.rank_in_group - first
