"""Layers of which each has a description of its own, as in Llama Nemotron."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from test_families import BASE

from kvferry import catalog
from kvferry.catalog import Entry, Options
from kvferry.errors import ConfigurationError

AUTO = Options("auto", draft_layers=False)


def layer(group: int | None, times: float, /, **more: object) -> Mapping[str, Mapping[str, object]]:
    """With attention where `group` query heads share a key."""
    own = {"n_heads_in_group": group, "no_op": group is None, "window_length": None, **more}
    return {"attention": own, "ffn": {"ffn_mult": times, "no_op": times == 0}}


def entry_of(*layers: object, **fields: object) -> Entry:
    given = {**BASE, "num_key_value_heads": None, "intermediate_size": None, "num_hidden_layers": len(layers)}
    return catalog.of_config({**given, **fields, "block_configs": list(layers)}, "test", AUTO)


def test_each_layer_keeps_what_its_own_heads_say_or_nothing():
    entry = entry_of(layer(4, 2.5), layer(None, 1.0), layer(8, 0))
    assert entry.cache.num_layers == 3
    assert [(each.layer, each.kept[0].state.axes[0].extent) for each in entry.cache.layers] == [(0, 2), (2, 1)]
    assert entry.cache.bytes_per_token == 2 * (2 + 1) * 8 * 2


def test_each_mlp_has_its_own_size():
    """Two thirds of the hidden size times the factor, up to a multiple of 256; queries and output, keys and values."""
    entry = entry_of(layer(4, 12.5), layer(None, 6), layer(None, 0))
    attention = 64 * (64 + 64 + 2 * 16)
    assert entry.num_active_parameters == 3 * 64 * (768 + 256) + attention + 100 * 64


def test_a_size_may_be_said_itself():
    one = {"attention": {"n_heads_in_group": 8}, "ffn": {"intermediate_size": 100}}
    assert entry_of(one).num_active_parameters == 3 * 64 * 100 + 64 * (128 + 16) + 100 * 64


def test_what_was_read_is_the_whole_list():
    entry = entry_of(layer(8, 1))
    (read,) = [field for field in entry.fields if field.name.startswith("block_configs")]
    assert read.name == "block_configs"
    assert {"which layers there are", "active parameters"} <= set(read.decides)
    assert not entry.notes


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([layer(3, 1)], "query heads per key head is not a whole number; found: 8 / 3"),
        ([layer(0, 1)], "field n_heads_in_group cannot be used; found: 0"),
        ([layer(4, 1, window_length=8)], "test, block_configs[0], attention: field window_length cannot be used"),
        ([layer(4, 1, replace_with_linear=True)], "field replace_with_linear cannot be used"),
        ([layer(4, -1)], "field ffn_mult cannot be used; found: -1"),
        ([{"attention": {"n_heads_in_group": 4}, "ffn": {"ffn_mult": True}}], "field ffn_mult cannot be used"),
        ([[1]], "a list of objects"),
        ([{"attention": 1}], "an object with fields of its own"),
    ],
)
def test_what_cannot_be_meant_is_refused(layers, message):
    with pytest.raises(ConfigurationError) as caught:
        entry_of(*layers)
    assert message in str(caught.value)


def test_a_list_of_another_length_is_refused():
    with pytest.raises(ConfigurationError, match="one entry for each of the 3 layers"):
        entry_of(layer(4, 1), num_hidden_layers=3)
