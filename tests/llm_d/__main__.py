"""The stand-in as a process of its own."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from aiohttp import web

from llm_d.nixlv2 import nixlv2
from llm_d.proxy import Connector, Sidecar
from llm_d.sglang import SGLang

CONNECTORS: dict[str, Callable[[], Connector]] = {"nixlv2": lambda: nixlv2, "sglang": SGLang}


def main() -> None:
    parser = argparse.ArgumentParser(prog="llm_d", description="A stand-in for llm-d's routing sidecar.")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--decoder", required=True, help="URL of the decode server")
    parser.add_argument("--kv-connector", choices=CONNECTORS, default="nixlv2")
    options = parser.parse_args()
    app = Sidecar(options.decoder.rstrip("/"), CONNECTORS[options.kv_connector]()).app()
    web.run_app(app, host="127.0.0.1", port=options.port, print=None, handler_cancellation=True)


if __name__ == "__main__":
    main()
