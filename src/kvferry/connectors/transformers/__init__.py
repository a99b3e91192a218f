"""Hugging Face transformers' continuous batching as an engine whose cache can be read and filled from outside.

Adapter only: it describes the cache, carries commands to the engine's thread and reports what happened there. Who may
use how much of the cache is decided above it (`kvferry.embedded.engine`). This package alone touches internals
of transformers; they were read in 5.19, and `tests/embedded/test_embedded_touched_names.py` names every one of them.
"""

from kvferry.connectors.transformers.core import Core

__all__ = ["Core"]
