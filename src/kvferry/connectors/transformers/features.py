"""What differs between the versions of transformers that the connector works with, found by looking and not by the
version. No other file of the connector asks which transformers this is.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import lru_cache
from typing import Any

import jinja2.meta
import torch  # noqa: F401 - before transformers, which complains in words of its own where it is missing
import transformers
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.utils.chat_template_utils import _compile_jinja_template

from kvferry.errors import ConfigurationError

OLDEST, NEWEST = (5, 18), (5, 24)


def check_version() -> None:
    """Raises ConfigurationError for a transformers that the connector has not been tried with."""
    words = transformers.__version__.split(".")
    found = tuple(int(word) if word.isdecimal() else 0 for word in words[:2])
    if not OLDEST <= found <= NEWEST:
        raise ConfigurationError(
            "this transformers' continuous batching is not supported",
            found=transformers.__version__,
            expected=f"a version from {_words(OLDEST)} to {_words(NEWEST)}",
            hint=f"pip install 'transformers>={_words(OLDEST)},<{NEWEST[0]}.{NEWEST[1] + 1}'",
        )


def _words(version: tuple[int, ...]) -> str:
    return ".".join(str(number) for number in version)


# --- attention that stays torch's own: an option since 5.19, before that a prefix of its name ---

_HAS_OPTION = "auto_switch_to_flash" in {field.name for field in fields(ContinuousBatchingConfig)}
ATTENTION = "sdpa" if _HAS_OPTION else "paged|sdpa"
ATTENTION_OPTIONS = {"auto_switch_to_flash": False} if _HAS_OPTION else {}


# --- who writes into the cache: since 5.19 the model's layers, before that the attention of each of them ---

_LAYERS_WRITE = "kwargs" in inspect.signature(PagedAttentionCache.update).parameters


def layers_without_cache(model: Any) -> frozenset[int]:
    """The numbers of the layers that see the keys and values of earlier ones (Gemma 3n), and keep none. Upstream has
    pages for them as well; only the attention of 5.18 writes them there, and reads them again."""
    parts = model.modules() if _LAYERS_WRITE else ()
    return frozenset(int(part.layer_idx) for part in parts if getattr(part, "is_kv_shared_layer", False))


# --- what a chat template reads of a message: since 5.22 upstream shows it copies, which nobody can ask afterwards ---


def render(tokenizer: Any, messages: Sequence[Mapping[str, Any]], values: Mapping[str, Any]) -> str:
    """The messages as the model's chat template writes them, given to it as they are. Raises jinja2.TemplateError."""
    template = _compile_jinja_template(tokenizer.get_chat_template())
    words = {"tools": None, "documents": None, **tokenizer.special_tokens_map, **values}
    return str(template.render(messages=messages, **words))


@lru_cache(maxsize=8)
def variables_of(template: str) -> frozenset[str]:
    """What a chat template asks its caller for. Names that it sets itself, in loops and macros among them, and what
    transformers gives every template are not there. Raises jinja2.TemplateError."""
    environment = _compile_jinja_template(template).environment
    return frozenset(jinja2.meta.find_undeclared_variables(environment.parse(template)))
