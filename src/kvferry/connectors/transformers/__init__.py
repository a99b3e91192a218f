"""Hugging Face transformers' continuous batching as an engine whose cache can be read and filled from outside.

Enters: commands for the engine's thread. Leaves: a description of the cache, and what happened there. Who may use how
much of the cache is decided above it (`kvferry.embedded.engine`). This package alone touches internals of transformers;
`tests/embedded/test_embedded_touched_names.py` names every one of them, and `features` has what differs between
versions.
"""

from kvferry.connectors.transformers.features import check_version, render, variables_of

# Before anything is imported that another version does not have.
check_version()

from kvferry.connectors.transformers.core import Core  # noqa: E402

__all__ = ["Core", "render", "variables_of"]
