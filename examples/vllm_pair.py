"""Two unmodified vLLM servers of one model: the first computes prompts, the second writes answers from its caches.

    python examples/vllm_pair.py
    python examples/vllm_pair.py --model Qwen/Qwen3-8B -- --kv-cache-memory-bytes 4294967296

`kvferry serve --engine vllm` starts `vllm serve` with kvferry's connector; what follows `--` goes to both servers. The
example asks the second server alone, then the router in front of both, and compares the tokens. Whether a cache really
moved is said by the answer's header `x-kvferry-cache`, and by vLLM's own counter of transferred bytes.

Needs `pip install 'kvferry[agent,router,nixl]'` in an environment with vLLM 0.32; `[engine,nixl]` for the tiny model,
which is made when no `--model` is given. On one device both servers have to fit in its memory. Give every server its
own with CUDA_VISIBLE_DEVICES, as in docs/vllm-gpus.md.
"""

from __future__ import annotations

import argparse
import os
import urllib.request

from kvferry.testing.output_check import compare
from kvferry.testing.servers import running

MODEL_NAME = "example"
# What follows `--` goes to `vllm serve`: a small cache, so that two servers fit on one device, and no compiling.
VLLM_OPTIONS = ("--", "--enforce-eager", "--max-model-len", "4096", "--kv-cache-memory-bytes", str(256 << 20))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="tiny")
    parser.add_argument("more", nargs="*", help="after --: options of vllm serve")
    options = parser.parse_args()
    # On CPUs several servers of vLLM share the cores; on GPUs nobody reads this.
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    prefill, decode = (serve(engine_id, options.model, options.more) for engine_id in ("prefill", "decode"))
    print("starting two vLLM servers and a router; vLLM takes a minute")
    with (
        running(prefill, decode) as (prefill_url, decode_url),
        running(("route", "--port", "0", "--prefill", prefill_url, "--decode", decode_url)) as (router_url,),
    ):
        found = compare(router_url, decode_url, MODEL_NAME)
        print(found)
        print(f"vLLM counted {bytes_received(decode_url):,} transferred bytes")
        return 0 if found.passed else 1


def serve(engine_id: str, model: str, more: list[str]) -> tuple[str, ...]:
    """One server. If a cache does not arrive the request fails, and is not answered by computing again."""
    name = ("--engine-id", engine_id, "--port", "0", "--model", model, "--served-name", MODEL_NAME)
    settings = ("--dtype", "float32", "--failure-policy", "fail")
    return ("serve", "--engine", "vllm", *name, *settings, *VLLM_OPTIONS, *more)


def bytes_received(url: str) -> int:
    """What vLLM has counted of the caches that came to a server."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as response:
        lines = response.read().decode().splitlines()
    return sum(int(float(line.split()[-1])) for line in lines if line.startswith("vllm:nixl_bytes_transferred_sum"))


if __name__ == "__main__":
    raise SystemExit(main())
