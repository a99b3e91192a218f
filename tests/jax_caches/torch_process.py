"""A torch engine in a process of its own, for one request: `python torch_process.py lease|fetch TENSOR_PARALLEL DTYPE`.

`lease` writes its offer as a line of JSON and ends when that was read; `fetch` reads an offer and checks what came.
"""

from __future__ import annotations

import json
import sys

import msgspec
from agents_of_engine import AgentsOfEngine, model_of
from torch_engine import TorchEngine

from kvferry.layout import EngineShape
from kvferry.session.commands import Fetched, LeaseEnded
from kvferry.wire.messages import Reference


def lease(side: AgentsOfEngine) -> None:
    reference, *_ = side.lease()
    print(json.dumps({"reference": msgspec.to_builtins(reference), "addresses": side.addresses}), flush=True)
    side.heard(LeaseEnded)


def fetch(side: AgentsOfEngine) -> None:
    offer = json.loads(sys.stdin.readline())
    side.fetch(msgspec.convert(offer["reference"], Reference), tuple(offer["addresses"]))
    side.heard(Fetched)
    side.check()


def main() -> None:
    what, tensor_parallel, dtype = sys.argv[1:]
    assert not any(name.startswith("jax") for name in sys.modules), "this engine knows nothing of JAX"
    do, engine_id = (lease, "p0") if what == "lease" else (fetch, "d0")
    block_tokens, num_blocks = (4, 16) if what == "lease" else (6, 9)
    shape = EngineShape(int(tensor_parallel), 1, block_tokens, num_blocks, format="head-major")
    side = AgentsOfEngine(engine_id, TorchEngine(model_of(dtype), shape, dtype))
    try:
        do(side)
    finally:
        side.close()


if __name__ == "__main__":
    main()
