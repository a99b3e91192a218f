"""Across engines: vLLM computes the prompt and transformers writes the answer, or the reverse.

    python examples/across_engines.py
    python examples/across_engines.py --prefill transformers --decode vllm
    python examples/across_engines.py --prefill transformers --decode transformers    # without vLLM

It starts both engines and a router, and sends one prompt to the router. The prefill engine's cache goes to the decode
engine, although their blocks have different sizes and layouts: both describe their caches to one another, and what goes
where is computed from that. At the end it asks the decode engine alone, which must give the same tokens.

Needs `pip install 'kvferry[engine,nixl]'`, into an environment with vLLM 0.32 where vLLM takes part. `--model` takes a
folder or a name on the Hugging Face Hub; without it a tiny model is made, whose answers mean nothing. Both engines
compute in float32, so that rounding does not make a difference between their answers.
"""

from __future__ import annotations

import argparse
import os

from kvferry.testing.output_check import compare
from kvferry.testing.servers import running

MODEL_NAME = "example"
# What follows `--` goes to `vllm serve`: a small cache, so that two servers fit on one device, and no compiling.
VLLM_OPTIONS = ("--", "--enforce-eager", "--max-model-len", "4096", "--kv-cache-memory-bytes", str(256 << 20))

ENGINES = ("vllm", "transformers")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--prefill", choices=ENGINES, default="vllm")
    parser.add_argument("--decode", choices=ENGINES, default="transformers")
    parser.add_argument("--model", default="tiny")
    options = parser.parse_args()
    # On CPUs several servers of vLLM share the cores; on GPUs nobody reads this.
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    prefill = serve("prefill", options.prefill, options.model)
    decode = serve("decode", options.decode, options.model)
    print(f"starting a prefill engine ({options.prefill}), a decode engine ({options.decode}) and a router")
    with (
        running(prefill, decode) as (prefill_url, decode_url),
        running(("route", "--port", "0", "--prefill", prefill_url, "--decode", decode_url)) as (router_url,),
    ):
        found = compare(router_url, decode_url, MODEL_NAME)
        print(found)
        return 0 if found.passed else 1


def serve(engine_id: str, engine: str, model: str) -> tuple[str, ...]:
    """One engine. If a cache does not arrive the request fails, and is not answered by computing again."""
    name = ("--engine-id", engine_id, "--port", "0", "--model", model, "--served-name", MODEL_NAME)
    settings = ("--dtype", "float32", "--failure-policy", "fail")
    return ("serve", "--engine", engine, *name, *settings, *(VLLM_OPTIONS if engine == "vllm" else ()))


if __name__ == "__main__":
    raise SystemExit(main())
