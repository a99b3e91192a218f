"""What a model keeps of a request, from its `config.json` or its well-known name.

Enters: a Hugging Face config, none of which is trusted, and how it is served (dtype of the cache, draft layers).
Leaves: a `kvferry.layout` model and what a token costs to compute. It knows no engine's shape, no address and no
weights.
"""

from __future__ import annotations

from kvferry.catalog.loader import hub_names, names, read
from kvferry.catalog.model import of_config
from kvferry.catalog.records import Entry, Options

__all__ = ["Entry", "Options", "hub_names", "names", "of_config", "read"]
