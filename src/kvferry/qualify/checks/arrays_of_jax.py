"""Caches that are arrays of JAX: out of a device's arrays into memory of the host, and back, byte for byte."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from itertools import count
from queue import Empty, SimpleQueue
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from numpy.typing import NDArray

import kvferry
from kvferry.errors import FerryError, TransportError
from kvferry.jax_caches import FIRST_ADDRESS, JaxCaches
from kvferry.layout import CacheModel, EngineShape, attention, describe
from kvferry.qualify.outcome import Figure, Outcome, failed, passed, skipped

NAME: Final = "arrays of JAX"
DTYPES: Final = (jnp.bfloat16, jnp.float8_e4m3fn, jnp.int8)
NUM_LAYERS, NUM_HEADS, HEAD_DIM, BLOCK_TOKENS, NUM_BLOCKS = 4, 8, 128, 16, 128
TABLE: Final = tuple(np.random.default_rng(4).permutation(NUM_BLOCKS)[: NUM_BLOCKS // 2].tolist())
NUM_TOKENS: Final = len(TABLE) * BLOCK_TOKENS
SHAPE: Final = (NUM_BLOCKS, BLOCK_TOKENS, NUM_HEADS, HEAD_DIM)
FORMAT: Final = "token-major"
MOST_DEVICES: Final = 2
REPEATS: Final = 3
NOTICE_S: Final = 60.0

Notices = SimpleQueue[kvferry.Notice]


def run(kind: str) -> Outcome:
    """Check the devices that JAX takes by itself."""
    found = jax.devices()
    if found[0].platform != kind:
        return skipped(NAME, f"JAX has {found[0].platform} devices; pip install 'jax[tpu]' on a TPU")
    return check(found[:MOST_DEVICES])


def check(devices: Sequence[jax.Device]) -> Outcome:
    """Move every element type both ways, with the heads divided over these devices, and see that nothing is compiled
    while that is done."""
    figures: list[Figure] = []
    for dtype in DTYPES:
        with ExitStack() as stack:
            try:
                pair = _Pair(devices, np.dtype(dtype), stack)
                num_compiled = pair.caches.num_compiled
                figures += [_figure(dtype, way, pair.num_bytes, move()) for way, move in pair.ways.items()]
                if pair.caches.num_compiled != num_compiled:
                    return failed(NAME, f"{pair.caches.num_compiled - num_compiled} programs were compiled in service")
            except FerryError as error:
                return failed(NAME, f"{np.dtype(dtype).name}: {error}")
    names = ", ".join(np.dtype(dtype).name for dtype in DTYPES)
    words = f"{NUM_TOKENS:,} tokens of {names} on {len(devices)} of its devices, both ways: every byte is right"
    return passed(NAME, words, tuple(figures))


def _figure(dtype: Any, way: str, num_bytes: int, seconds: float) -> Figure:
    return Figure(f"{np.dtype(dtype).name}, {way}", num_bytes / seconds / 1e9)


class _Pair:
    """An engine of JAX and one in memory of the host, in this process."""

    def __init__(self, devices: Sequence[jax.Device], dtype: np.dtype[Any], stack: ExitStack) -> None:
        """Everything is closed by `stack`."""
        self._model: CacheModel = attention(NUM_LAYERS, NUM_HEADS, HEAD_DIM, dtype.name, dtype.itemsize)
        self._dtype, self._stack, self._numbers = dtype, stack, count()
        sharding = NamedSharding(Mesh(np.array(devices), ("heads",)), PartitionSpec(None, None, "heads", None))
        self._put: Any = partial(jax.device_put, device=sharding)
        arrays = tuple(self._put(np.zeros(SHAPE, dtype)) for _ in range(2 * NUM_LAYERS))
        self.caches = JaxCaches(arrays, describe(self._model, self._shape(len(devices)), FIRST_ADDRESS))
        size_bytes = 2 * NUM_LAYERS * int(np.prod(SHAPE)) * dtype.itemsize
        shared = kvferry.allocate_shared(size_bytes, "kvferry-qualify")
        stack.callback(shared.close)
        self._host = np.frombuffer(shared.buffer, np.uint8)[:size_bytes]
        cache = kvferry.Cache(describe(self._model, self._shape(1), shared.memory.address), (shared.memory,))
        of_jax = [self.caches.cache(rank) for rank in range(len(devices))]
        self._jax_agents, self._jax_notices = self._agents("jax", of_jax)
        self._host_agents, self._host_notices = self._agents("host", [cache])
        self.num_bytes = int(NUM_TOKENS * self._model.bytes_per_token)
        self.ways = {"to the host": self._to_host, "from the host": self._from_host}

    def _shape(self, num_ranks: int) -> EngineShape:
        return EngineShape(num_ranks, 1, BLOCK_TOKENS, NUM_BLOCKS, FORMAT)

    def _agents(self, name: str, caches: Sequence[kvferry.Cache]) -> tuple[list[kvferry.Agent], Notices]:
        epoch, notices = kvferry.new_epoch(), Notices()
        found = []
        for rank, cache in enumerate(caches):
            agent = kvferry.open_agent(kvferry.AgentConfig(name, epoch, rank), cache, notices.put)
            found.append(self._stack.enter_context(agent))
        return found, notices

    def _to_host(self) -> float:
        """Return the median time in seconds. Raises TransportError when bytes are wrong, or do not come."""
        arrays = [self._noise(number) for number in range(2 * NUM_LAYERS)]
        with self.caches.turn() as turn:
            turn.arrays = tuple(map(self._put, arrays))
        self._host[:] = 0
        taken = [self._fetched(self._jax_agents, self._host_agents, self._host_notices) for _ in range(REPEATS)]
        found = self._host.view(self._dtype).reshape(2 * NUM_LAYERS, *SHAPE)
        self._compare(arrays, list(found), "to the host")
        return statistics.median(taken)

    def _from_host(self) -> float:
        """Return the median time in seconds. Raises TransportError as `_to_host` does."""
        arrays = [self._noise(-1 - number) for number in range(2 * NUM_LAYERS)]
        self._host[:] = np.concatenate([array.reshape(-1).view(np.uint8) for array in arrays])
        with self.caches.turn() as turn:
            turn.arrays = tuple(self._put(np.zeros(SHAPE, self._dtype)) for _ in arrays)
        taken = [self._fetched(self._host_agents, self._jax_agents, self._jax_notices) for _ in range(REPEATS)]
        with self.caches.turn() as turn:
            found = [np.asarray(array) for array in turn.arrays]
        self._compare(arrays, found, "from the host")
        return statistics.median(taken)

    def _noise(self, number: int) -> NDArray[Any]:
        seed = 1000 + number
        num_bytes = int(np.prod(SHAPE)) * self._dtype.itemsize
        return np.random.default_rng(seed).integers(0, 256, num_bytes, np.uint8).view(self._dtype).reshape(SHAPE)

    def _compare(self, wanted: list[NDArray[Any]], found: list[NDArray[Any]], way: str) -> None:
        """Check that blocks of the table are there, and all others are as they were: zeros. Raises TransportError."""
        others = sorted(set(range(NUM_BLOCKS)) - set(TABLE))
        for here, there in zip(found, wanted, strict=True):
            if not np.array_equal(_bits(here[list(TABLE)]), _bits(there[list(TABLE)])):
                raise TransportError(f"wrong bytes {way}")
            if _bits(here[others]).any():
                raise TransportError(f"blocks of others were touched {way}")

    def _fetched(self, sources: list[kvferry.Agent], targets: list[kvferry.Agent], notices: Notices) -> float:
        """The time from the first `fetch` to the last `Fetched`, in seconds. Raises TransportError."""
        lease = kvferry.LeaseRequest(f"r{next(self._numbers)}", kvferry.new_lease_id(), (TABLE,), NUM_TOKENS)
        reference, *_ = [agent.lease(lease) for agent in sources]
        addresses = tuple(agent.address for agent in sources)
        tokens = kvferry.TokenRange(0, NUM_TOKENS)
        began = time.perf_counter()
        for target in targets:
            target.fetch(kvferry.FetchRequest(lease.request_id, reference, addresses, (TABLE,), (tokens,)))
        for _ in targets:
            self._expect_fetched(notices)
        return time.perf_counter() - began

    def _expect_fetched(self, notices: Notices) -> None:
        try:
            # Leases of earlier fetches end on the same thread.
            while isinstance(notice := notices.get(timeout=NOTICE_S), kvferry.LeaseEnded):
                continue
        except Empty:
            raise TransportError(f"the agent says nothing for {NOTICE_S:g} s") from None
        if not isinstance(notice, kvferry.Fetched):
            raise TransportError("the cache did not arrive", found=str(notice))


def _bits(array: NDArray[Any]) -> NDArray[np.uint8]:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
