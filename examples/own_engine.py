"""An engine of one's own: a toy with paged blocks that gives caches to other engines and takes theirs.

    python examples/own_engine.py                              # two processes of the toy
    python examples/own_engine.py http://127.0.0.1:8000/v1     # transformers -> toy -> transformers

For the second, `kvferry serve` runs beside it. Explained in docs/bring-your-own-engine.md.
"""

import json
import subprocess
import sys
from concurrent.futures import Future
from urllib.request import Request, urlopen

import numpy as np

import kvferry
from kvferry.kv_transfer_params import from_params, to_params
from kvferry.layout import EngineShape, attention, describe

MODEL = attention(num_layers=4, num_heads=4, head_dim=64, dtype="float32", item_bytes=4)
BLOCK_TOKENS, NUM_BLOCKS = 8, 64


class ToyEngine:
    """Blocks [block, layer, key or value, token, head, dim], and who has them. It has no model."""

    def __init__(self, name: str) -> None:
        shape = EngineShape(1, 1, BLOCK_TOKENS, NUM_BLOCKS, format="block-major")
        self.shared = kvferry.allocate_shared(NUM_BLOCKS * BLOCK_TOKENS * MODEL.bytes_per_token, name)
        self.blocks = np.frombuffer(self.shared.buffer, np.float32).reshape(NUM_BLOCKS, 4, 2, BLOCK_TOKENS, 4, 64)
        self.free = list(range(NUM_BLOCKS))
        self.tables: dict[str, tuple[int, ...]] = {}
        self.fetches: dict[str, Future[kvferry.FetchReport]] = {}
        self.cache = kvferry.Cache(describe(MODEL, shape, self.shared.memory.address), (self.shared.memory,))
        self.agent = kvferry.open_agent(kvferry.AgentConfig(name), self.cache, self.hear)

    def allocate(self, request_id: str, num_tokens: int) -> tuple[int, ...]:
        table = tuple(self.free.pop() for _ in range(-(-num_tokens // BLOCK_TOKENS)))
        self.tables[request_id] = table
        return table

    def hear(self, notice: kvferry.Notice) -> None:
        """On the agent's thread: blocks are ours again, or a fetch is over."""
        match notice:
            case kvferry.LeaseEnded(request_id) | kvferry.BlocksReleased(request_id):
                self.free += self.tables.pop(request_id)
            case kvferry.Fetched(request_id, report):
                self.fetches.pop(request_id).set_result(report)
            case kvferry.FetchFailed(request_id, error):
                self.fetches.pop(request_id).set_exception(error)

    def prefill(self, request_id: str, token_ids: list[int]) -> None:
        """What a model would compute: here, every token has a value of its own."""
        table = self.allocate(request_id, len(token_ids))
        for position, token_id in enumerate(token_ids):
            self.blocks[table[position // BLOCK_TOKENS], :, :, position % BLOCK_TOKENS] = position + token_id / 1024

    def offer(self, request_id: str, num_tokens: int) -> dict[str, object]:
        """Lease a computed cache; what comes back goes to the other engine, through HTTP or anything else."""
        tables = (self.tables[request_id],)
        request = kvferry.LeaseRequest(request_id, kvferry.new_lease_id(), tables, num_tokens)
        return to_params(self.agent.lease(request), [self.agent.address], tables, num_tokens)

    def fetch(self, request_id: str, params: dict[str, object], num_tokens: int) -> kvferry.FetchReport:
        """Bring the first tokens of what somebody offers into blocks of our own."""
        remote, tables = from_params(params), (self.allocate(request_id, num_tokens),)
        future = self.fetches[request_id] = Future()
        ranges = (kvferry.TokenRange(0, num_tokens),)
        self.agent.fetch(kvferry.FetchRequest(request_id, remote.reference, remote.addresses, tables, ranges))
        return future.result(timeout=60)


def two_processes() -> None:
    """Another process of this file prefills; this one gets its cache, and looks at it."""
    command = [sys.executable, __file__, "prefill"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        params = json.loads(other.stdout.readline())
        engine = ToyEngine("decode")
        with engine.agent:
            report = engine.fetch("request-1", params, 100)
        (table,) = engine.tables.values()
        arrived = engine.blocks[list(table)].transpose(0, 3, 1, 2, 4, 5).reshape(-1, 4, 2, 4, 64)[:100]
        expected = np.arange(100) + np.arange(100, 200) / 1024
        same = np.array_equal(arrived, np.broadcast_to(expected[:, None, None, None, None], arrived.shape))
        print(json.dumps({"equal": same, "bytes": report.num_bytes, "transport": report.transport}))
        other.stdin.close()


def prefill_process() -> None:
    """The other process: it has the cache until its standard input ends."""
    engine = ToyEngine("prefill")
    with engine.agent:
        engine.prefill("request-1", list(range(100, 200)))
        print(json.dumps(engine.offer("request-1", 100)), flush=True)
        sys.stdin.read()


def through_transformers(url: str) -> None:
    """transformers prefills, the toy gets the cache and offers it, transformers decodes from the toy's blocks."""

    def complete(**more: object) -> dict:
        body = {"model": "", "prompt": "The ferry leaves the harbour at dawn and", "max_tokens": 24, **more}
        request = Request(f"{url}/completions", json.dumps(body).encode(), {"content-type": "application/json"})
        with urlopen(request, timeout=120) as response:
            return json.load(response)

    alone = complete()["choices"][0]["text"]
    params = complete(kv_transfer_params={"do_remote_decode": True}, max_tokens=1)["kv_transfer_params"]
    engine = ToyEngine("toy")
    with engine.agent:
        num_tokens = params["remote_num_tokens"]
        report = engine.fetch("request-1", params, num_tokens)
        ferried = complete(kv_transfer_params=engine.offer("request-1", num_tokens))["choices"][0]["text"]
    print(json.dumps({"equal": alone == ferried, "bytes": report.num_bytes, "text": ferried}))


if __name__ == "__main__":
    match sys.argv[1:]:
        case []:
            two_processes()
        case ["prefill"]:
            prefill_process()
        case [url]:
            through_transformers(url)
