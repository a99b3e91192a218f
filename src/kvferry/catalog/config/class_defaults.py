"""What transformers' own class of a config takes for granted where a config.json says nothing."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping

UNKNOWN: Mapping[str, object] = {}


def class_values(config: Mapping[str, object]) -> Mapping[str, object]:
    """All fields of a config as its class completes them: what it gives, what the class adds, and what it works out of
    both. Empty where transformers is not installed, does not know the `model_type`, or cannot make sense of the config.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or importlib.util.find_spec("transformers") is None:
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
