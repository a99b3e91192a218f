"""The configs that we ship against figures worked out by hand, in numbers, from the models' own descriptions."""

from __future__ import annotations

import json
from importlib import resources

import pytest

from kvferry import catalog
from kvferry.catalog import Options

AUTO = Options("auto", draft_layers=False)

# Bytes per token: layers * (key and value) * heads * dim * bytes.
# Fixed bytes: layers * (convolutions * inputs kept * bytes + state * bytes).
FIGURES = {
    "llama-3.1-8b": (32 * 2 * 8 * 128 * 2, 0, ("full",)),
    "llama-3.3-70b": (80 * 2 * 8 * 128 * 2, 0, ("full",)),
    "qwen3-8b": (36 * 2 * 8 * 128 * 2, 0, ("full",)),
    "qwen3-32b": (64 * 2 * 8 * 128 * 2, 0, ("full",)),
    "qwen3-235b-a22b": (94 * 2 * 4 * 128 * 2, 0, ("full",)),
    "gemma-3-27b": (62 * 2 * 16 * 128 * 2, 0, ("window-1024", "full")),
    "mistral-7b": (32 * 2 * 8 * 128 * 2, 0, ("window-4096",)),
    "mistral-small-3.2-24b": (40 * 2 * 8 * 128 * 2, 0, ("full",)),
    "gpt-oss-120b": (36 * 2 * 8 * 64 * 2, 0, ("window-128", "full")),
    "llama-4-scout": (48 * 2 * 8 * 128 * 2, 0, ("chunk-8192", "full")),
    "deepseek-v2-lite": (27 * (512 + 64) * 2, 0, ("full",)),
    "deepseek-v3": (61 * (512 + 64) * 2, 0, ("full",)),
    "deepseek-v3.2": (61 * ((512 + 64) * 2 + 128 + 4), 0, ("full",)),
    # Rows of the window, what entries of 4 and of 128 tokens are computed from in float32, and the entries themselves.
    "deepseek-v4-flash": (
        43 * 512 * 2
        + (21 * (2 * 2 * 512 + 2 * 2 * 128) + 20 * 2 * 512) * 4
        + 21 * (512 * 2 + 128 + 4) // 4
        + 20 * 512 * 2 // 128,
        0,
        ("window-128", "every-4", "window-8", "every-128"),
    ),
    "nemotron-h-8b": (
        4 * 2 * 8 * 128 * 2,
        24 * ((128 * 64 + 2 * 8 * 128) * 3 * 2 + 128 * 64 * 128 * 4),
        ("recurrent", "full"),
    ),
    "bamba-9b": (
        3 * 2 * 8 * 128 * 2,
        29 * ((128 * 64 + 2 * 1 * 128) * 3 * 2 + 128 * 64 * 128 * 2),
        ("recurrent", "full"),
    ),
    "falcon-h1-7b": (
        44 * 2 * 2 * 128 * 2,
        44 * ((3072 + 2 * 1 * 256) * 3 * 2 + 24 * 128 * 256 * 2),
        ("full", "recurrent"),
    ),
    "jamba-1.5-mini": (4 * 2 * 8 * 128 * 2, 28 * (2 * 4096 * 3 * 2 + 2 * 4096 * 16 * 2), ("recurrent", "full")),
    "qwen3-next-80b-a3b": (
        12 * 2 * 2 * 256 * 2,
        36 * ((2 * 16 * 128 + 32 * 128) * 3 * 2 + 32 * 128 * 128 * 2),
        ("recurrent", "full"),
    ),
    "tiny": (4 * 2 * 4 * 64 * 4, 0, ("full",)),
}

# Active parameters in billions as published, and what to take off them because a token of a prompt is not multiplied
# with it: an input embedding apart from the output matrix. Llama, Mistral, Qwen3 and the hybrids publish all weights.
PUBLISHED = {
    "llama-3.1-8b": (8.03, 128256 * 4096),
    "llama-3.3-70b": (70.55, 128256 * 8192),
    "qwen3-8b": (8.19, 151936 * 4096),
    "qwen3-32b": (32.76, 151936 * 5120),
    "qwen3-235b-a22b": (22.0, 0),
    "gemma-3-27b": (27.0, 0),
    "mistral-7b": (7.24, 32000 * 4096),
    "mistral-small-3.2-24b": (23.57, 131072 * 5120),
    "gpt-oss-120b": (5.13, 0),
    "llama-4-scout": (17.0, 202048 * 5120),
    "deepseek-v2-lite": (2.4, 0),
    "deepseek-v3": (37.0, 0),
    "deepseek-v3.2": (37.0, 0),
    "deepseek-v4-flash": (13.0, 0),
    "nemotron-h-8b": (8.1, 131072 * 4096),
    "bamba-9b": (9.78, 128256 * 4096),
    "falcon-h1-7b": (7.59, 130048 * 3072),
    "jamba-1.5-mini": (12.0, 0),
    # "3B activated" is rounded: the model's technical figures give 3.9 with both embeddings.
    "qwen3-next-80b-a3b": (3.9, 151936 * 2048),
    "tiny": (0.00367, 1024 * 256),
}


def config_of(name: str) -> dict[str, object]:
    file = resources.files("kvferry.catalog") / "configs" / f"{name}.json"
    return json.loads(file.read_text(encoding="utf-8"))


def test_names_are_those_of_the_table():
    assert set(catalog.names()) == set(FIGURES) == set(PUBLISHED)


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


@pytest.mark.parametrize("name", FIGURES)
def test_a_file_and_a_folder_say_the_same_as_the_name(name, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config_of(name)), encoding="utf-8")
    by_name = catalog.read(name, AUTO)
    for source in (path, str(path), tmp_path):
        entry = catalog.read(source, AUTO)
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
