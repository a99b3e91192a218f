"""The trained model of the extra `demo`: named with its terms, made once, and refused where it is not installed."""

from __future__ import annotations

import importlib.util
import json
import sys
import types

import pytest

from kvferry.cli import console, models
from kvferry.embedded.model import trained
from kvferry.embedded.model.trained import FOLDER, GEMMA, NEEDED, TERMS, ensure_gemma
from kvferry.errors import ConfigurationError

IS_INSTALLED = all(importlib.util.find_spec(name) for name in NEEDED)


def make_up_packages(monkeypatch, missing=()):
    """As if they were installed, all but some."""
    monkeypatch.setattr(trained.importlib.util, "find_spec", lambda name: None if name in missing else object())


def builder(monkeypatch, build):
    """Instead of the one that unpacks."""
    module = types.ModuleType("kvferry.embedded.model.gguf")
    module.build = build
    monkeypatch.setitem(sys.modules, module.__name__, module)


def test_what_is_not_installed_is_named_with_the_command(monkeypatch, tmp_path):
    make_up_packages(monkeypatch, missing=("gguf",))
    with pytest.raises(ConfigurationError, match="not installed") as refused:
        ensure_gemma(tmp_path, print)
    assert refused.value.found == "no package gguf"
    assert "pip install 'kvferry[demo]'" in refused.value.hint
    assert "tiny model" in refused.value.hint


def test_it_is_made_once_and_its_terms_come_first(monkeypatch, tmp_path):
    make_up_packages(monkeypatch)
    said = []

    def build(folder):
        assert TERMS in said[0]
        (folder / "config.json").write_text("{}")

    builder(monkeypatch, build)
    assert ensure_gemma(tmp_path, said.append) == tmp_path / FOLDER
    assert len(said) == 3
    builder(monkeypatch, None)
    assert ensure_gemma(tmp_path, said.append) == tmp_path / FOLDER
    assert len(said) == 3


def test_a_build_that_fails_leaves_nothing(monkeypatch, tmp_path):
    make_up_packages(monkeypatch)

    def build(folder):
        (folder / "packed.gguf").write_bytes(b"half")
        raise ConfigurationError("no")

    builder(monkeypatch, build)
    with pytest.raises(ConfigurationError):
        ensure_gemma(tmp_path, print)
    assert list(tmp_path.iterdir()) == []


def test_its_name_is_an_option(monkeypatch, tmp_path):
    monkeypatch.setenv("KVFERRY_CACHE", str(tmp_path))
    monkeypatch.setattr(console, "say", print)
    make_up_packages(monkeypatch)
    builder(monkeypatch, lambda folder: (folder / "config.json").write_text("{}"))
    assert models.resolve(GEMMA) == (str(tmp_path / FOLDER), GEMMA)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.skipif(not IS_INSTALLED, reason="needs the extra demo: make accuracy")
def test_the_real_one_knows_its_language(tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = ensure_gemma(models.cache_directory(), print)
    config = json.loads((folder / "config.json").read_text())
    assert (config["architectures"], "quantization_config" in config) == (["Gemma3ForCausalLM"], False)
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    ids = tokenizer("Once upon a time there was a king who had three beautiful daughters.", return_tensors="pt")
    assert ids["input_ids"][0][0] == tokenizer.bos_token_id
    # Random weights are at 12.5, the logarithm of the vocabulary.
    assert model(**ids, labels=ids["input_ids"]).loss < 4
