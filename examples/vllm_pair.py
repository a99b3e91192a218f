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

from support import MODEL_NAME, VLLM_OPTIONS, bytes_received, compare, running


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="tiny")
    parser.add_argument("more", nargs="*", help="after --: options of vllm serve")
    options = parser.parse_args()
    prefill, decode = (serve(engine_id, options.model, options.more) for engine_id in ("prefill", "decode"))
    print("starting two vLLM servers and a router; vLLM takes a minute")
    with (
        running(prefill, decode) as (prefill_url, decode_url),
        running(("route", "--port", "0", "--prefill", prefill_url, "--decode", decode_url)) as (router_url,),
    ):
        code = compare(router_url, decode_url)
        print(f"vLLM counted {bytes_received(decode_url):,} transferred bytes")
        return code


def serve(engine_id: str, model: str, more: list[str]) -> tuple[str, ...]:
    """One server. If a cache does not arrive the request fails, and is not answered by computing again."""
    name = ("--engine-id", engine_id, "--port", "0", "--model", model, "--served-name", MODEL_NAME)
    settings = ("--dtype", "float32", "--failure-policy", "fail")
    return ("serve", "--engine", "vllm", *name, *settings, *VLLM_OPTIONS, *more)


if __name__ == "__main__":
    raise SystemExit(main())
