"""From a Hugging Face `config.json`, or the name of a well-known model, to what the model keeps of a request."""

from __future__ import annotations

from kvferry.catalog.loader import hub_names, names, read
from kvferry.catalog.model import of_config
from kvferry.catalog.records import Entry, Options

__all__ = ["Entry", "Options", "hub_names", "names", "of_config", "read"]
