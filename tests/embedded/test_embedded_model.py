"""The tiny model: the same on every machine, made once, by however many processes."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoTokenizer

from kvferry import catalog
from kvferry.embedded.model.tiny import TINY_MODEL_NAME, ensure_tiny_model


def test_it_is_made_once_and_always_the_same(tmp_path: Path, model_path: Path) -> None:
    said: list[str] = []
    first = ensure_tiny_model(tmp_path / "new" / "folder", said.append)
    assert first == tmp_path / "new" / "folder" / TINY_MODEL_NAME
    assert len(said) == 2
    for name in ("model.safetensors", "tokenizer.json", "config.json"):
        assert (first / name).read_bytes() == (model_path / name).read_bytes()
    said.clear()
    assert ensure_tiny_model(first.parent, said.append) == first
    assert said == []


def test_several_at_once_leave_one_model_and_no_litter(tmp_path: Path) -> None:
    together = threading.Barrier(3)
    paths: list[Path] = []

    def make() -> None:
        together.wait()
        paths.append(ensure_tiny_model(tmp_path, lambda sentence: None))

    threads = [threading.Thread(target=make) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(paths) == {tmp_path / TINY_MODEL_NAME}
    assert [path.name for path in tmp_path.iterdir()] == [TINY_MODEL_NAME]


def test_a_plan_knows_it(model_path: Path) -> None:
    made, known = (catalog.read(name, catalog.Options("auto", False)) for name in (model_path, "tiny"))
    assert (made.cache, made.num_active_parameters) == (known.cache, known.num_active_parameters)


def test_it_is_what_it_says(model_path: Path) -> None:
    config, tokenizer = AutoConfig.from_pretrained(model_path), AutoTokenizer.from_pretrained(model_path)
    assert (config.hidden_size, config.num_hidden_layers, config.num_key_value_heads, config.head_dim) == (
        256,
        4,
        4,
        64,
    )
    assert config.max_position_embeddings == 8192
    assert len(tokenizer) == config.vocab_size == 1024
    for text in ("The ferry", "färja 漢 🚢", ""):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(OSError, match="file"):
        ensure_tiny_model(tmp_path / "file", lambda sentence: None)
