"""From a config's fields to what the model keeps and computes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from kvferry.catalog.config.dtypes import PACKED_LATENT, cache_item, model_item, recurrent_item
from kvferry.catalog.config.families import language_fields
from kvferry.catalog.config.fields import Fields
from kvferry.catalog.layers import linear, mamba
from kvferry.catalog.layers.attention import attention
from kvferry.catalog.layers.latent import indexer_layers, latent_attention
from kvferry.catalog.layers.layer_types import Layer, draft_layers, layers_of
from kvferry.catalog.layers.mixer import Mixer
from kvferry.catalog.layers.mlp import mlp_parameters
from kvferry.catalog.records import Entry, Options
from kvferry.errors import ConfigurationError
from kvferry.plan.description.model import CacheModel, LayerCache


def of_config(config: Mapping[str, object], name: str, options: Options) -> Entry:
    """What the model of a Hugging Face config keeps of a request, and an estimate of what it computes.

    Raises ConfigurationError naming `name`, the field, what was found and what was expected.
    """
    if not isinstance(config, Mapping):
        raise ConfigurationError(f"{name}: a config must be a JSON object", found=type(config).__name__)
    fields = language_fields(name, config)
    if options.cache_dtype == PACKED_LATENT and not fields.has("kv_lora_rank"):
        raise ConfigurationError(
            f"{name}: only latent attention can be kept as {PACKED_LATENT}",
            found="no field kv_lora_rank",
            hint="choose float8_e4m3fn for keys and values in 8 bits",
        )
    layers = layers_of(fields)
    mixers = _mixers(fields, layers, indexer_layers(fields, len(layers)), options)
    drafts = draft_layers(fields) if options.draft_layers else ()
    draft_mixers = _mixers(fields, drafts, (True,) * len(drafts), options)
    own = _num_own_layers(fields, len(layers))
    kept = [_cache(layer, f"model.layers.{layer}", mixer) for layer in range(own) for mixer in mixers[layer]]
    # Draft layers run behind the last layer, so they live with the last pipeline stage.
    last = len(layers) - 1
    kept += [_cache(last, f"draft.layers.{i}", mixer) for i, each in enumerate(draft_mixers) for mixer in each]
    active = sum(mixer.num_parameters for each in mixers for mixer in each) + mlp_parameters(fields, layers)
    active += fields.number("vocab_size") * fields.number("hidden_size")
    return Entry(name, CacheModel(len(layers), tuple(kept)), active, _notes(fields, layers, options))


def _num_own_layers(fields: Fields, num_layers: int) -> int:
    """How many layers keep keys and values of their own; the last ones may reuse those of earlier layers."""
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
    keys = list(zip(layers, has_indexers, strict=True))
    made = {key: tuple(_layer_mixers(fields, *key, options)) for key in dict.fromkeys(keys)}
    return [made[key] for key in keys]


def _layer_mixers(fields: Fields, layer: Layer, has_indexer: bool, options: Options) -> Iterator[Mixer]:
    if layer.attention:
        item = cache_item(fields, options)
        if fields.has("kv_lora_rank"):
            yield latent_attention(fields, layer.attention, item, has_indexer)
        else:
            yield attention(fields, layer.attention, item)
    if layer.recurrent == "conv":
        yield linear.short_convolution(fields, model_item(fields))
    if layer.recurrent == "linear":
        yield _recurrent(fields)


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
    raise fields.missing("mamba_d_state", "ssm_state_size", "linear_num_value_heads", "linear_attn_config")


def _notes(fields: Fields, layers: tuple[Layer, ...], options: Options) -> tuple[str, ...]:
    """What the config left open."""
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
