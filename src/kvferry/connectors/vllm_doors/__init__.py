"""What our HTTP routes and headers are on vLLM's own server: `--middleware kvferry.connectors.vllm_doors.Doors`.

Nothing here imports vLLM: it is given the running one with each request.
"""

from kvferry.connectors.vllm_doors.doors import Doors

__all__ = ["Doors"]
