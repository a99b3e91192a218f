"""What a model keeps and computes, by the fields of its config."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType

from kvferry.catalog.config.dtypes import PACKED_LATENT, cache_item, model_item, recurrent_item
from kvferry.catalog.config.families import given_names, language_fields, outer_fields
from kvferry.catalog.config.fields import Fields
from kvferry.catalog.config.unused import check_unused
from kvferry.catalog.layers import block_configs, linear, mamba
from kvferry.catalog.layers.attention import HEADS, attention
from kvferry.catalog.layers.compressed import COMPRESSED, compressed_attention
from kvferry.catalog.layers.latent import indexer_layers, latent_attention
from kvferry.catalog.layers.layer_types import Layer, draft_layers, layers_of
from kvferry.catalog.layers.mixer import Mixer
from kvferry.catalog.layers.mlp import mlp_parameters
from kvferry.catalog.records import Entry, FieldRead, Options
from kvferry.errors import ConfigurationError
from kvferry.plan.description.model import CacheModel, LayerCache


def of_config(
    config: Mapping[str, object], name: str, options: Options, completed: Mapping[str, object] = MappingProxyType({})
) -> Entry:
    """What the model of a Hugging Face config keeps of a request, and an estimate of what it computes. `completed` is
    the same config as its class completes it, where that is known (`kvferry.catalog.config.class_defaults`).

    Raises ConfigurationError naming `name`, the field, what was found and what was expected.
    """
    if not isinstance(config, Mapping):
        raise ConfigurationError(f"{name}: a config must be a JSON object", found=type(config).__name__)
    fields = language_fields(name, config, completed)
    if options.cache_dtype == PACKED_LATENT and not fields.has("kv_lora_rank", *COMPRESSED):
        raise ConfigurationError(
            f"{name}: only latent attention can be kept as {PACKED_LATENT}",
            found="no field kv_lora_rank",
            hint="choose float8_e4m3fn for keys and values in 8 bits",
        )
    layers = layers_of(fields.about("which layers there are"))
    mixers = _mixers(fields, layers, indexer_layers(fields.about("which layers have an indexer"), len(layers)), options)
    if not any(layer.attention for layer in layers):
        fields.skip(*HEADS)
    drafts = draft_layers(fields.about("draft layers")) if options.draft_layers else ()
    draft_mixers = _mixers(fields.without("per_layer_config"), drafts, (True,) * len(drafts), options)
    own = _num_own_layers(fields.about("which layers keep a cache"), len(layers))
    kept = [_cache(layer, f"model.layers.{layer}", mixer) for layer in range(own) for mixer in mixers[layer]]
    # Draft layers run behind the last layer, so they live with the last pipeline stage.
    last = len(layers) - 1
    kept += [_cache(last, f"draft.layers.{i}", mixer) for i, each in enumerate(draft_mixers) for mixer in each]
    active = sum(mixer.num_parameters for each in mixers for mixer in each) + _other_parameters(fields, layers)
    read = _read(fields, given_names(config), "transformers" if completed else "table")
    notes = _notes(fields.about("notes"), layers, options) + _left_out(read)
    notes += check_unused((fields, outer_fields(name, config)), len(layers), options)
    return Entry(name, CacheModel(len(layers), tuple(kept)), active, notes, read)


def _other_parameters(fields: Fields, layers: tuple[Layer, ...]) -> int:
    """Active weights beside the mixers'."""
    asking = fields.about("active parameters")
    return mlp_parameters(asking, layers) + asking.number("vocab_size") * asking.number("hidden_size")


def _read(fields: Fields, given: frozenset[str], otherwise: str) -> tuple[FieldRead, ...]:
    """The fields that counted, and who says each: the config, if it has `given` it. Not those of single layers only."""
    return tuple(
        FieldRead(name, fields.value_at(name), tuple(decides), "config" if name.split(".")[0] in given else otherwise)
        for name, decides in sorted(fields.taken.items())
        if fields.value_at(name) is not None
    )


def _left_out(read: tuple[FieldRead, ...]) -> tuple[str, ...]:
    """A note on the fields that counted although the config does not have them."""
    by = {"transformers": "its class in transformers", "table": "a table of ours"}
    missing = [field for field in read if field.said_by in by and "." not in field.name]
    if not missing:
        return ()
    names = ", ".join(field.name for field in missing)
    return (f"left out by the config, and taken from {by[missing[0].said_by]}: {names}",)


def _num_own_layers(fields: Fields, num_layers: int) -> int:
    """How many layers keep keys and values of their own; the last ones may reuse those of earlier layers."""
    if not fields.flag("use_cla", False):
        fields.skip("cla_share_factor")  # how many layers would share theirs
    num_sharing = fields.count("num_kv_shared_layers")
    if num_sharing >= num_layers:
        raise fields.wrong("num_kv_shared_layers", num_sharing, f"fewer than the {num_layers} layers")
    return num_layers - num_sharing


def _cache(layer: int, prefix: str, mixer: Mixer) -> LayerCache:
    states = [replace(kept.state, name=f"{prefix}.{kept.state.name}") for kept in mixer.kept]
    kept = [replace(kept, state=state) for kept, state in zip(mixer.kept, states, strict=True)]
    return LayerCache(layer, mixer.group, tuple(kept))


def _mixers(
    fields: Fields, layers: tuple[Layer, ...], has_indexers: tuple[bool, ...], options: Options
) -> list[tuple[Mixer, ...]]:
    """The mixers of each layer; layers alike share one description."""
    own = _own_numbers(fields, len(layers))
    by_layer = {int(layer): numbers for layer, numbers in own.items()}
    keys = list(zip(layers, has_indexers, (by_layer.get(layer, ()) for layer in range(len(layers))), strict=True))
    made = {key: tuple(_layer_mixers(fields, *key, options)) for key in dict.fromkeys(keys)}
    for layer, numbers in own.items():
        fields.skip(*(f"per_layer_config.{layer}.{name}" for name, _ in numbers if name in fields.used))
    return [made[key] for key in keys]


def _own_numbers(fields: Fields, num_layers: int) -> dict[str, tuple[tuple[str, int], ...]]:
    """The numbers in which single layers differ from the others, by the layer's number as it is written: 5 or 05."""
    if fields.has(block_configs.FIELD):
        heads = enumerate(block_configs.key_heads(fields))
        return {str(layer): (("num_key_value_heads", number),) for layer, number in heads if number}
    given = fields.inner("per_layer_config")
    for name in given.values:
        if not re.fullmatch("[0-9]{1,4}", name) or int(name) >= num_layers:
            raise given.wrong(name, given.values[name], f"the number of one of the {num_layers} layers as its name")
    return {name: tuple(given.inner(name).all_numbers()) for name in given.values}


def _layer_mixers(
    fields: Fields, layer: Layer, has_indexer: bool, numbers: tuple[tuple[str, int], ...], options: Options
) -> Iterator[Mixer]:
    fields = fields.with_values({**fields.values, **dict(numbers)})
    if layer.attention:
        fields = _own_fields(fields, layer)
        item = cache_item(fields.about("size of an element"), options)
        if layer.attention == "compressed" or fields.has(*COMPRESSED):
            yield from compressed_attention(fields.about("compressed tokens"), layer.word, item)
        elif fields.has("kv_lora_rank"):
            yield latent_attention(fields.about("latents"), layer.attention, item, has_indexer)
        else:
            yield attention(fields.about("keys and values"), layer.attention, item, has_indexer)
    if layer.recurrent == "conv":
        yield linear.short_convolution(fields.about("states"), model_item(fields.about("size of an element")))
    if layer.recurrent == "linear":
        yield _recurrent(fields.about("states"))


def _own_fields(fields: Fields, layer: Layer) -> Fields:
    """The fields of a layer, whose kind of attention may have numbers of its own in a nested object."""
    own = fields.inner("attention_other_setting")
    fields.skip(*(own.prefix + name for name in ("num_attention_heads", "num_attention_groups", "head_dim")))
    if own.word("attention_type") != layer.word:
        return fields
    return fields.with_values({**fields.values, **own.values})


def _recurrent(fields: Fields) -> Mixer:
    """The recurrent mixer that the config's fields describe."""
    item, recurrent = model_item(fields), recurrent_item(fields)
    if fields.has("linear_num_value_heads"):
        return linear.delta_net(fields, item, recurrent)
    if fields.has("linear_attn_config", "linear_num_heads"):
        return linear.kimi_delta_net(fields, item)
    if fields.has(*mamba.STATE):
        make = mamba.mamba2 if fields.has(*mamba.HEADS) else mamba.mamba1
        return make(fields, item, recurrent)
    if fields.has("short_conv_kernel_size"):
        return linear.kimi_delta_net(fields, item)
    if fields.has(*linear.LIGHTNING):
        return linear.lightning_attention(fields, item)
    raise fields.missing("mamba_d_state", "ssm_state_size", "linear_num_value_heads", "linear_attn_config")


def _notes(fields: Fields, layers: tuple[Layer, ...], options: Options) -> tuple[str, ...]:
    """Notes on what the config left open."""
    notes = []
    if not fields.has("dtype", "torch_dtype"):
        notes.append("the config has no dtype: assuming bfloat16")
    if options.draft_layers and not draft_layers(fields):
        notes.append("the config has no draft layers")
    if options.cache_dtype != "auto" and any(layer.recurrent for layer in layers):
        notes.append("recurrent states keep the model's dtype; the dtype of the cache is that of keys and values")
    quantised = fields.inner("quantization_config")
    if options.cache_dtype == "auto" and quantised.has("kv_cache_scheme", "kv_cache_quant_algo"):
        notes.append("the checkpoint has scales for a quantized cache: pass its dtype if the engine uses them")
    return tuple(notes)
