"""What goes into an engine and what comes out of it: the words between an engine's adapter and whoever drives it."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry import NOT_AHEAD, Ahead
from kvferry.connectors.sampling import GREEDY, Sampling
from kvferry.connectors.step_cost import NO_COST, StepCost

BlockTables = tuple[tuple[int, ...], ...]
"""The block ids of one request, per cache group."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What to serve and how large the cache is: `num_blocks` blocks of `block_tokens` tokens of the whole model.

    `model` is a folder or a name on the Hugging Face hub; `dtype` is a torch name such as `float32`, or `auto`. A step
    takes at least what `step_cost` says: real tokens as fast as another model. With `layer_wise` jobs that tell
    their progress do so after every layer, else after every step. `device` is what torch calls the one that computes;
    transports register the memory of `buffer_device`: the same (`auto`), or `cpu`. `staging_memory` is `host` or
    `device`.
    """

    model: str
    dtype: str = "auto"
    block_tokens: int = 16
    num_blocks: int = 1024
    max_batch_tokens: int = 512
    num_threads: int = 1
    step_cost: StepCost = NO_COST
    layer_wise: bool = False
    device: str = "cpu"
    buffer_device: str = "auto"
    staging_memory: str = "host"


@dataclass(frozen=True, slots=True)
class Job:
    """One request as the engine sees it. The cache of the first `num_cached` tokens is in its blocks already.

    With `hold` its blocks stay as they are after the last token, until they are freed by command. With `tells_progress`
    it says how far its prompt is computed, where that can be relied upon.
    """

    request_id: str
    prompt: tuple[int, ...]
    max_new_tokens: int
    stop_token_ids: frozenset[int]
    num_cached: int
    hold: bool
    tells_progress: bool = False
    sampling: Sampling = GREEDY


@dataclass(frozen=True, slots=True)
class GroupSize:
    """What one cache group takes from the pool: sectors of `blocks_per_sector` blocks of `block_tokens` tokens.

    A group with `ring_tokens` above 0 keeps only that many tokens of a request.
    """

    block_tokens: int
    blocks_per_sector: int
    ring_tokens: int


@dataclass(frozen=True, slots=True)
class Allocated:
    """Blocks were given to a request that does not run yet; no tables when the pool had none left."""

    request_id: str
    block_tables: BlockTables


@dataclass(frozen=True, slots=True)
class Progressed:
    """The first `num_tokens` tokens of a held request are in these blocks and stay as they are, and some states of more
    tokens (`ahead`); others are computed."""

    request_id: str
    block_tables: BlockTables
    num_tokens: int
    ahead: Ahead = NOT_AHEAD


@dataclass(frozen=True, slots=True)
class Held:
    """A request is finished and its blocks stay: the tables of every cache group."""

    request_id: str
    block_tables: BlockTables


@dataclass(frozen=True, slots=True)
class Freed:
    """The blocks of a request are back in the pool by command."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Produced:
    """All tokens of a request so far. `num_computed` prompt tokens went through the model before the first of them.

    When `finished`, the blocks are back in the pool unless they were to be held.
    """

    request_id: str
    tokens: tuple[int, ...]
    num_computed: int
    finished: bool
    error: str


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token and the logarithm of its probability."""

    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class Scored:
    """What the model thinks of the token that the next `Produced` brings, and its likeliest tokens, best first. Comes
    for every token of a job whose sampling wants `logprobs`."""

    request_id: str
    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True)
class Unanswerable:
    """A request leaves the engine no token to choose; what is produced for it from now on is no answer."""

    request_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Stopped:
    """The engine's thread has ended; `reason` is empty when that was asked for."""

    reason: str


Event = Allocated | Progressed | Held | Freed | Produced | Scored | Unanswerable | Stopped
