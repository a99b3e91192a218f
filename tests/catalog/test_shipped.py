"""The configs that we ship against figures worked out by hand, in numbers, from the models' own descriptions."""

from __future__ import annotations

import json
from importlib import resources

import pytest
from shipped_figures import FIGURES, PUBLISHED, SOURCES

from kvferry import catalog
from kvferry.catalog import Options

AUTO = Options("auto", draft_layers=False)


def config_of(name: str) -> dict[str, object]:
    file = resources.files("kvferry.catalog") / "configs" / f"{name}.json"
    return json.loads(file.read_text(encoding="utf-8"))


def test_names_are_those_of_the_tables():
    assert set(catalog.names()) == set(FIGURES) == set(PUBLISHED)


def test_every_model_has_a_source_of_its_numbers():
    assert set(SOURCES) | {"tiny"} == set(catalog.names())


@pytest.mark.parametrize("name", FIGURES)
def test_bytes_worked_out_by_hand(name):
    bytes_per_token, fixed_bytes, groups = FIGURES[name]
    entry = catalog.read(name, AUTO)
    assert entry.name == name
    assert entry.cache.bytes_per_token == bytes_per_token
    assert entry.cache.fixed_bytes == fixed_bytes
    assert entry.cache.groups() == groups


@pytest.mark.parametrize("name", PUBLISHED)
def test_active_parameters_are_near_the_published_figure(name):
    billions, looked_up = PUBLISHED[name]
    active = catalog.read(name, AUTO).num_active_parameters
    assert active == pytest.approx(billions * 1e9 - looked_up, rel=0.05)


def test_a_model_has_its_names_on_the_hub_with_and_without_an_owner(tmp_path, monkeypatch):
    listed = [(name, hub) for name in catalog.names() for hub in catalog.hub_names(name)]
    assert {name for name, _ in listed} | {"tiny"} == set(catalog.names())
    assert len({hub.rpartition("/")[2].lower() for _, hub in listed}) == len(listed)
    for name, hub in listed:
        for alias in (hub, hub.upper(), hub.partition("/")[2]):
            entry = catalog.read(alias, AUTO)
            assert (entry.name, entry.cache) == (alias, catalog.read(name, AUTO).cache)
    # A folder that lies there is what is meant, as one that was downloaded may.
    monkeypatch.chdir(tmp_path)
    (tmp_path / "Kimi-K2.5").mkdir()
    (tmp_path / "Kimi-K2.5" / "config.json").write_text(json.dumps(config_of("tiny")), encoding="utf-8")
    assert catalog.read("Kimi-K2.5", AUTO).cache.num_layers == 4
    assert catalog.read("kimi-k2.6", AUTO).cache.num_layers == 61


@pytest.mark.parametrize("name", FIGURES)
def test_a_file_and_a_folder_say_the_same_as_the_name(name, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config_of(name)), encoding="utf-8")
    for source, options in ((path, AUTO), (str(path), AUTO), (tmp_path, AUTO), (path, Options("auto", True))):
        by_name, entry = catalog.read(name, options), catalog.read(source, options)
        assert entry.name == str(path)
        assert (entry.cache, entry.num_active_parameters) == (by_name.cache, by_name.num_active_parameters)


def test_quantised_keys_and_values_take_half_the_bytes():
    entry = catalog.read("llama-3.1-8b", Options("float8_e4m3fn", draft_layers=False))
    assert entry.cache.bytes_per_token == 32 * 2 * 8 * 128
    assert {kept.state.dtype for kept in entry.cache.kept()} == {"float8_e4m3fn"}


def test_recurrent_states_keep_their_dtype_when_the_cache_is_quantised():
    entry = catalog.read("nemotron-h-8b", Options("fp8", draft_layers=False))
    assert entry.cache.fixed_bytes == FIGURES["nemotron-h-8b"][1]
    assert entry.cache.bytes_per_token == 4 * 2 * 8 * 128
    assert "recurrent states keep the model's dtype" in entry.notes[0]


def test_a_packed_latent_row_has_656_bytes():
    entry = catalog.read("deepseek-v3.2", Options("fp8_ds_mla", draft_layers=False))
    latent, key, scale = entry.cache.layers[0].kept
    assert [axis.name for axis in latent.state.axes] == ["byte"]
    assert (latent.num_bytes, latent.state.item_bytes, latent.divided_axis) == (512 + 4 * 4 + 64 * 2, 1, "")
    assert (key.num_bytes, scale.num_bytes, scale.state.dtype) == (128, 4, "float32")
    assert entry.cache.bytes_per_token == 61 * (656 + 132)


def test_draft_layers_live_with_the_last_layer():
    entry = catalog.read("deepseek-v3.2", Options("auto", draft_layers=True))
    own = catalog.read("deepseek-v3.2", AUTO)
    assert entry.cache.num_layers == 61
    assert [layer.layer for layer in entry.cache.layers][-2:] == [60, 60]
    names = [kept.state.name for kept in entry.cache.layers[-1].kept]
    assert names == ["draft.layers.0.latent", "draft.layers.0.indexer.k", "draft.layers.0.indexer.scale"]
    assert entry.num_active_parameters == own.num_active_parameters
    assert "has no draft layers" in catalog.read("qwen3-8b", Options("auto", draft_layers=True)).notes[0]


def test_a_quantized_checkpoint_may_have_a_quantized_cache():
    """Its config, which we do not have, says so. What is shipped is that of the model as it was trained."""
    for name, is_noted in (("nvidia/DeepSeek-V3.1-NVFP4", True), ("qwen3-32b-fp8", True), ("Qwen/Qwen3-32B", False)):
        notes = catalog.read(name, AUTO).notes
        assert any("quantized cache" in note for note in notes) is is_noted
    assert not any("quantized" in note for note in catalog.read("qwen3-32b-fp8", Options("fp8", False)).notes)
