"""Our HTTP routes and headers on vLLM's own server: `--middleware kvferry.connectors.vllm_middleware.FerryMiddleware`.

Enters: ASGI messages on their way to vLLM. Leaves: the same with what vLLM must be told, and our own answers. Nothing
here imports vLLM: it is given the running one with each request.
"""

from kvferry.connectors.vllm_middleware.middleware import FerryMiddleware

__all__ = ["FerryMiddleware"]
