"""Unequal tensor parallelism: a vLLM server of two ranks computes prompts for a server of one rank, or the reverse.

    python examples/mixed_tp.py
    python examples/mixed_tp.py --prefill-tp 1 --decode-tp 2
    python examples/mixed_tp.py --decode-block-tokens 64

Each rank of a server with `--tensor-parallel-size 2` holds half of the KV heads. The server of one rank fetches its
halves from both ranks and puts them together; the reverse reads half of every row. Before it starts anything, the
example asks `kvferry plan` what that takes: the same planner computes the copies of the real transfer.

Needs `pip install 'kvferry[agent,router,nixl]'` in an environment with vLLM 0.32; `[engine,nixl]` for the tiny model,
which is made when no `--model` is given. On GPUs three are needed, or give the servers theirs as in docs/vllm-gpus.md;
on CPUs ranks share the cores. Other ranks add in another order: in float32 the tokens are equal nevertheless, in
16-bit types single tokens of a long answer may differ, with a transfer and without.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys

from kvferry.testing.output_check import compare
from kvferry.testing.servers import running

MODEL_NAME = "example"
# What follows `--` goes to `vllm serve`: a small cache, so that two servers fit on one device, and no compiling.
VLLM_OPTIONS = ("--", "--enforce-eager", "--max-model-len", "4096", "--kv-cache-memory-bytes", str(256 << 20))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--prefill-tp", type=int, default=2)
    parser.add_argument("--decode-tp", type=int, default=1)
    parser.add_argument("--decode-block-tokens", type=int, default=128, help="the prefill server has blocks of 128")
    options = parser.parse_args()
    show_plan(options.prefill_tp, options.decode_tp, options.decode_block_tokens)
    # On CPUs several servers of vLLM share the cores; on GPUs nobody reads this.
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    prefill = serve("prefill", options.model, options.prefill_tp, 128)
    decode = serve("decode", options.model, options.decode_tp, options.decode_block_tokens)
    print(
        f"starting vLLM with {options.prefill_tp} and with {options.decode_tp} ranks; this takes some minutes on CPUs"
    )
    with (
        running(prefill, decode) as (prefill_url, decode_url),
        running(("route", "--port", "0", "--prefill", prefill_url, "--decode", decode_url)) as (router_url,),
    ):
        found = compare(router_url, decode_url, MODEL_NAME)
        print(found)
        return 0 if found.passed else 1


def show_plan(prefill_tp: int, decode_tp: int, decode_block_tokens: int) -> None:
    """What a prompt of a large model would take between servers like these; without hardware."""
    sides = (f"tp={prefill_tp},block=128", f"tp={decode_tp},block={decode_block_tokens}")
    words = ("plan", "--model", "llama-3.3-70b", "--prefill", sides[0], "--decode", sides[1], "--tokens", "8192")
    subprocess.run([sys.executable, "-m", "kvferry", *words], check=True, timeout=60)


def serve(engine_id: str, model: str, num_ranks: int, block_tokens: int) -> tuple[str, ...]:
    """One server. If a cache does not arrive the request fails, and is not answered by computing again."""
    name = ("--engine-id", engine_id, "--port", "0", "--model", model, "--served-name", MODEL_NAME)
    settings = ("--dtype", "float32", "--block-tokens", str(block_tokens), "--failure-policy", "fail")
    return ("serve", "--engine", "vllm", *name, *settings, *VLLM_OPTIONS, "--tensor-parallel-size", str(num_ranks))


if __name__ == "__main__":
    raise SystemExit(main())
