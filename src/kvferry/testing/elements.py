"""Every element of a cache, by its own placement: where it lies, and a value that encodes what it is.

Written without the planner, so that it can find the planner's errors.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from itertools import product

from kvferry.plan.description.layout import CacheGroup, Layout, Placement, State
from kvferry.plan.description.tokens import TokenRange

Tables = Sequence[Sequence[int]]
Coordinate = tuple[int, ...]


def value_of(state: State, token: int, coordinate: Coordinate) -> bytes:
    """The bytes that one element must hold: they encode its whole identity."""
    identity = f"{state.name}|{token}|{coordinate}".encode()
    return hashlib.blake2b(identity, digest_size=state.item_bytes).digest()


def element_addresses(
    layout: Layout, placement: Placement, tables: Tables, tokens: TokenRange
) -> Iterator[tuple[int, Coordinate, int]]:
    """(token, logical coordinate, address) of every element of a placement; token 0 for a state without tokens. Where
    a state keeps an entry for several tokens, `tokens` are entries: see `complete_entries`."""
    state = layout.state_named()[placement.state]
    group, table = layout.groups[placement.group], tables[placement.group]
    start = layout.regions[placement.region].address + placement.offset
    for token, position in own_tokens(group, tokens) if state.per_token else ((0, 0),):
        slot = position % group.ring_tokens if group.ring_tokens else position
        if not 0 <= table[slot // group.block_tokens] < group.num_blocks:
            continue  # the request has no such block any more
        kernel, slot = divmod(
            table[slot // group.block_tokens] * group.block_tokens + slot % group.block_tokens, kernel_tokens(group)
        )
        base = start + kernel * placement.block_stride + slot * placement.token_stride
        for coordinate in product(*(range(s.start, s.stop) for s in placement.spans)):
            steps = zip(coordinate, placement.spans, placement.strides, strict=True)
            yield token, coordinate, base + sum((c - span.start) * stride for c, span, stride in steps)


def complete_entries(state: State, tokens: TokenRange) -> TokenRange:
    """The entries of a state whose last token lies in a range: counted one by one."""
    ends = [token for token in range(tokens.last) if (token + 1) % state.compress_ratio == 0]
    return TokenRange(sum(end < tokens.first for end in ends), len(ends))


def kernel_tokens(group: CacheGroup) -> int:
    """Tokens of the smallest block that lies in one piece."""
    return group.block_tokens // group.kernel_blocks


def own_tokens(group: CacheGroup, tokens: TokenRange) -> Iterator[tuple[int, int]]:
    """The tokens of a range that a rank has, and how many it has before each: counted one by one."""
    share, num_before = group.share, 0
    for token in range(tokens.last):
        if token // share.run_tokens % share.num_shares != share.share:
            continue
        if token >= tokens.first:
            yield token, num_before
        num_before += 1
