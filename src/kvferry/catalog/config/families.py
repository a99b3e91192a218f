"""What the configuration classes of model families assume when a saved config.json does not say.

Nested text configs are saved without the fields that equal their class's defaults, and a few families keep the
arrangement of their layers in code. `families.json` is the only place where a family's name decides anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import resources
from types import MappingProxyType
from typing import Any

import msgspec

from kvferry.catalog.config.fields import BY_NUMBERS, Fields
from kvferry.catalog.config.unused import OF_DRAFTS
from kvferry.errors import ConfigurationError


class Family(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is known of a `model_type`.

    `defaults` are values of fields that a config leaves out, `renamed` its names for what others call differently.
    `text_model` is the family of a nested text config that does not name its own. `every_layer` is the type of all
    layers where the config names none, `draft_layer` that of its draft heads. A `plain_mlp` has two matrices, not
    three, though its activation does not tell. An `encoder` generates text, and keeps a cache, only with `is_decoder`.
    `differs` says how the caches of two engines differ, of which a config tells neither.
    """

    defaults: dict[str, Any] = {}
    renamed: dict[str, str] = {}
    text_model: str = ""
    every_layer: str = ""
    draft_layer: str = ""
    plain_mlp: bool = False
    encoder: bool = False
    differs: str = ""


_FAMILIES = msgspec.json.decode(
    resources.files("kvferry.catalog.config").joinpath("families.json").read_bytes(), type=dict[str, Family]
)


def family_of(model_type: str) -> Family:
    """Without anything special where the family is not known."""
    return _FAMILIES.get(model_type, Family())


_NESTED = ("text_config", "llm_config", "language_config")
_INHERITED = ("dtype", "torch_dtype", "quantization_config", "vocab_size")

_UNKNOWN: Mapping[str, str] = {
    # Fields of models whose caches this catalog cannot describe: better refused than described wrongly.
    "cross_attention_layers": "cross attention",
    "is_encoder_decoder": "an encoder and a decoder",
    "rwkv_version": "RWKV",
}
_HEADS_WITHOUT_TEXT = (
    "ForMaskedLM",
    "ForSequenceClassification",
    "ForTokenClassification",
    "ForQuestionAnswering",
    "ForMultipleChoice",
)


def _check_generates(source: str, config: Mapping[str, object], family: str) -> None:
    """Raises ConfigurationError for a model that reads text without writing any: its engine keeps no cache."""
    architectures = config.get("architectures")
    names = [name for name in architectures if isinstance(name, str)] if isinstance(architectures, list) else []
    is_encoder = family_of(family).encoder and config.get("is_decoder") is not True
    if is_encoder or (names and all(name.endswith(_HEADS_WITHOUT_TEXT) for name in names)):
        raise ConfigurationError(
            f"{source}: this model generates no text, so it has no KV cache to move",
            found=", ".join(names) or f"model_type {family}",
            expected="a model that generates text, such as one whose architecture ends in ForCausalLM",
        )


def given_names(config: Mapping[str, object]) -> frozenset[str]:
    """What a config says itself, also by another name of its family."""
    values = {**config, **Fields("", config).inner(*_NESTED).values}
    names = frozenset(name for name, value in values.items() if value is not None)
    renamed = family_of(str(values.get("model_type"))).renamed
    also = {"model_type", *(("dtype",) if "torch_dtype" in names else ())}
    return names | {renamed[name] for name in names & set(renamed)} | also


def outer_fields(source: str, config: Mapping[str, object]) -> Fields:
    """What a config says beside a nested one of its language model; nothing where that is not nested."""
    nested = Fields(source, config).inner(*_NESTED)
    if not nested.values:
        return Fields(source, {})
    return Fields(source, {name: config[name] for name in config if name not in nested.values and name not in _NESTED})


def language_fields(
    source: str, config: Mapping[str, object], completed: Mapping[str, object] = MappingProxyType({})
) -> Fields:
    """The fields of the language model in a config. Where it does not say, its family's defaults count, and before them
    what its class has `completed` it to.

    Raises ConfigurationError when a nested config is no object, or when the model is known to keep what the catalog
    cannot describe.
    """
    fields = Fields(source, config)
    family = fields.word("model_type")
    nested = fields.inner(*_NESTED)
    if nested.values:
        inherited = {name: config[name] for name in _INHERITED if name in config}
        family = nested.word("model_type") or family_of(family).text_model or family
        fields = Fields(nested.source, inherited | dict(nested.values))
        fields.skip(*inherited)
        completed = Fields(source, completed).inner(*_NESTED).values
    else:
        # What a class nests that the file does not is made of nothing.
        completed = {name: value for name, value in completed.items() if name not in _NESTED}
    # A class counts the draft layers of the model that it was written for: others of that class have none.
    completed = {name: value for name, value in completed.items() if not OF_DRAFTS.search(name)}
    for each in dict.fromkeys((Fields(source, config).word("model_type"), family)):
        _check_generates(source, config, each)
    if family_of(family).differs:
        raise ConfigurationError(
            f"{source}: engines keep different caches of this model",
            found=f"model_type {family}: {family_of(family).differs}",
            expected="one whose config says what every engine keeps",
            hint=BY_NUMBERS,
        )
    for name, what in _UNKNOWN.items():
        if fields.raw(name):
            raise ConfigurationError(
                f"{source}: the model has {what}, which the catalog cannot describe",
                found=f"field {name}",
                expected="attention, latent attention, state-space layers or gated delta nets",
                hint="describe the cache yourself as a kvferry.plan.description.model.CacheModel",
            )
    assumed = {name: value for name, value in family_of(family).defaults.items() if name not in fields.values}
    # A class knows what a null means to it.
    given = {name: value for name, value in fields.values.items() if value is not None or name not in completed}
    renamed = family_of(family).renamed
    values = {**completed, **assumed, **given, "model_type": family}
    named = Fields(fields.source, {renamed.get(name, name): value for name, value in values.items()})
    named.skip("model_type", *_UNKNOWN, *assumed)
    return named
