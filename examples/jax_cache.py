"""A cache of JAX, with its heads over two devices, moves to an engine with another layout in memory of the host.

    XLA_FLAGS=--xla_force_host_platform_device_count=2 python examples/jax_cache.py

Both engines are in this process. Needs the extra `jax`, and two devices of any kind: the flag makes CPUs of them.
Explained in docs/jax.md.
"""

from contextlib import ExitStack
from queue import SimpleQueue

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import kvferry
from kvferry.jax_caches import FIRST_ADDRESS, JaxCaches
from kvferry.layout import EngineShape, attention, describe

MODEL = attention(num_layers=4, num_heads=4, head_dim=64, dtype="bfloat16", item_bytes=2)
# Keys and values of each layer are an array [block, token, head, dim] of their own.
SHAPE = EngineShape(tensor_parallel=2, pipeline_parallel=1, block_tokens=16, num_blocks=32, format="token-major")
NUM_ARRAYS, NUM_TOKENS, TABLE = 8, 100, (3, 1, 4, 15, 9, 2, 6)


@jax.jit
def empty() -> tuple[jax.Array, ...]:
    return tuple(jnp.zeros((32, 16, 4, 64), jnp.bfloat16) for _ in range(NUM_ARRAYS))


def step(arrays: tuple[jax.Array, ...], table: jax.Array) -> tuple[jax.Array, ...]:
    """What a model would compute: here, array number n has n everywhere."""
    return tuple(array.at[table].set(float(number)) for number, array in enumerate(arrays))


def prefill_engine(notices: "SimpleQueue[kvferry.Notice]") -> tuple[JaxCaches, list[kvferry.Agent]]:
    sharding = NamedSharding(Mesh(np.array(jax.devices()[:2]), ("heads",)), PartitionSpec(None, None, "heads", None))
    caches = JaxCaches(jax.device_put(empty(), sharding), describe(MODEL, SHAPE, FIRST_ADDRESS))
    epoch = kvferry.new_epoch()
    configs = [kvferry.AgentConfig("jax", epoch, rank) for rank in range(2)]
    agents = [kvferry.open_agent(config, caches.cache(config.rank), notices.put) for config in configs]
    return caches, agents


def decode_engine(notices: "SimpleQueue[kvferry.Notice]") -> tuple[kvferry.SharedMemory, kvferry.Agent]:
    shape = EngineShape(1, 1, block_tokens=128, num_blocks=4, format="block-major")
    shared = kvferry.allocate_shared(4 * 128 * MODEL.bytes_per_token, "host")
    cache = kvferry.Cache(describe(MODEL, shape, shared.memory.address), (shared.memory,))
    return shared, kvferry.open_agent(kvferry.AgentConfig("host"), cache, notices.put)


def main() -> None:
    leased: SimpleQueue[kvferry.Notice] = SimpleQueue()
    fetched: SimpleQueue[kvferry.Notice] = SimpleQueue()
    caches, sources = prefill_engine(leased)
    shared, target = decode_engine(fetched)
    with ExitStack() as opened:
        opened.callback(shared.close)
        for agent in (*sources, target):
            opened.enter_context(agent)
        compiled = jax.jit(step, donate_argnums=0)
        with caches.turn() as turn:
            turn.arrays = compiled(turn.arrays, jnp.array(TABLE))
        wanted = kvferry.LeaseRequest("r1", kvferry.new_lease_id(), (TABLE,), NUM_TOKENS)
        # Every rank leases its part; their references are equal.
        references = [agent.lease(wanted) for agent in sources]
        addresses = tuple(agent.address for agent in sources)
        tokens = kvferry.TokenRange(0, NUM_TOKENS)
        target.fetch(kvferry.FetchRequest("q1", references[0], addresses, ((2,),), (tokens,)))
        found = fetched.get(timeout=60.0)
        if not isinstance(found, kvferry.Fetched):
            raise SystemExit(f"the cache was not fetched: {found}")
        print(f"{found.report.num_bytes:,} bytes of {NUM_TOKENS} tokens from 2 devices to 1: right: {is_right(shared)}")


def is_right(shared: kvferry.SharedMemory) -> bool:
    block = np.frombuffer(shared.buffer, jnp.bfloat16).reshape(4, NUM_ARRAYS, 128, 4, 64)[2, :, :NUM_TOKENS]
    return all(bool((block[number] == number).all()) for number in range(NUM_ARRAYS))


if __name__ == "__main__":
    main()
