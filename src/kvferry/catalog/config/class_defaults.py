"""What transformers' own class of a config takes for granted where a config.json says nothing."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping

from kvferry.catalog.config.fields import MAX_LAYERS

UNKNOWN: Mapping[str, object] = {}
_COUNTS = ("layer", "label", "num_block", "depth", "dense_replace")
"""Parts of names of fields for which classes make lists of that length."""


def class_values(config: Mapping[str, object]) -> Mapping[str, object]:
    """All fields of a config as its class completes them: what it gives, what the class adds, and what it works out of
    both. Empty where transformers is not installed, does not know the `model_type`, or cannot make sense of the config,
    and where it would make lists that are longer than any model's.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or importlib.util.find_spec("transformers") is None:
        return UNKNOWN
    if any(count > MAX_LAYERS for count in _counts(config)):
        return UNKNOWN
    from transformers import CONFIG_MAPPING
    from transformers.utils import logging

    if model_type not in CONFIG_MAPPING:
        return UNKNOWN
    verbosity = logging.get_verbosity()
    # What a class warns of, such as tokens beyond the vocabulary, is about answers.
    logging.set_verbosity_error()
    try:
        completed: Mapping[str, object] = CONFIG_MAPPING[model_type].from_dict(dict(config)).to_dict()
    except Exception:  # noqa: BLE001 - a class may raise anything; the plan says where its numbers come from
        return UNKNOWN
    finally:
        logging.set_verbosity(verbosity)
    return completed


def _counts(config: Mapping[str, object]) -> Iterator[int]:
    """The whole numbers, in nested objects too, for which a class may make lists."""
    objects = [config]
    for fields in objects:
        objects += [value for value in fields.values() if isinstance(value, Mapping)]
        counts = {name: value for name, value in fields.items() if isinstance(value, int)}
        yield from (value for name, value in counts.items() if any(part in name for part in _COUNTS))
