"""Every model that transformers builds to generate text: what its own cache holds of a token, beside what the catalog
reads from its config. Equal, or refused: `make test-catalog` counts them."""

from __future__ import annotations

import warnings
from math import prod

import pytest
import torch
from test_shipped import AUTO
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from kvferry import catalog
from kvferry.errors import ConfigurationError

pytestmark = [pytest.mark.slow, pytest.mark.catalog, pytest.mark.uncounted, pytest.mark.filterwarnings("ignore")]

NUM_TOKENS = 3


def config_of(family: str) -> PreTrainedConfig:
    """As its class makes it from nothing."""
    try:
        return CONFIG_MAPPING[family]()
    except Exception as error:  # noqa: BLE001 - some classes need others' configs
        pytest.skip(f"its class makes no config from nothing: {type(error).__name__}")


def elements_read(entry: catalog.Entry) -> dict[int, int]:
    """How many elements of a token each layer keeps, of those that keep any."""
    kept: dict[int, int] = {}
    for layer in entry.cache.layers:
        states = [each.state for each in layer.kept if each.state.per_token]
        if states:
            kept[layer.layer] = sum(prod(axis.extent for axis in state.axes) for state in states)
    return kept


def elements_held(config: PreTrainedConfig) -> dict[int, int]:
    """The same of the cache that the model fills. Nothing has memory: a step on the meta device tells shapes."""
    try:
        with warnings.catch_warnings(), torch.device("meta"), torch.no_grad():
            warnings.simplefilter("ignore")
            model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.bfloat16).eval()
            output = model(input_ids=torch.zeros((1, NUM_TOKENS), dtype=torch.long), use_cache=True)
    except Exception as error:  # noqa: BLE001 - what does not run as its class makes it is no witness
        pytest.skip(f"does not run on the meta device: {str(error)[:100]}")
    cache = output.get("past_key_values") or output["cache_params"]
    rows = [(getattr(layer, "keys", None), getattr(layer, "values", None)) for layer in cache.layers]
    held = {
        layer: keys.shape[1] * keys.shape[3] + values.shape[1] * values.shape[3]
        for layer, (keys, values) in enumerate(rows)
        if keys is not None and values is not None
    }
    return {layer: count for layer, count in held.items() if count}


@pytest.mark.parametrize("family", sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
def test_the_catalog_says_what_the_models_own_cache_holds(family):
    config = config_of(family)
    try:
        entry = catalog.of_config(config.to_dict(), family, AUTO)
    except ConfigurationError as refusal:
        pytest.skip(f"refused: {str(refusal).partition('; ')[0][:110]}")
    if any(each.state.name.endswith("latent") for each in entry.cache.kept()):
        pytest.skip("transformers keeps the keys and values that a latent stands for")
    assert elements_read(entry) == elements_held(config)
