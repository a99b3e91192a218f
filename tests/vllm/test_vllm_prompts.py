"""What identifies a prompt of vLLM: everything that vLLM's own prefix cache tells apart, and by content."""

import importlib
import json
import os
import threading
import warnings
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm.v1", reason="needs vLLM's own environment")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM's and torch's own, at import
    importlib.import_module("vllm.v1.worker.utils")

import torch
from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.request import Request

from kvferry.connectors.vllm import adapters, prompts
from kvferry.connectors.vllm.prompts import Prompts, media_are_identified
from kvferry.errors import RequestError
from kvferry.plan.prompt import Prompt

SIZE, HIDDEN = 8, 4


def image(identifier="a", offset=2, length=3, mm_hash=None):
    return MultiModalFeatureSpec(None, "image", identifier, PlaceholderRange(offset, length), mm_hash or identifier)


def request(tokens=tuple(range(SIZE)), **more):
    return Request("r", list(tokens), SamplingParams(), None, **more)


def accepts(source, target, num_tokens=SIZE, names=None):
    """Whether what was computed of one request is taken for the beginning of another."""
    names = names or Prompts()
    return names.of(source, SIZE).begins_with(names.of(target, num_tokens).name("lease"), "lease")


def adapter(folder, name="tuned", number=1, weights=b"weights", rank=8):
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({"r": rank}))
    (folder / "adapter_model.safetensors").write_bytes(weights)
    return LoRARequest(name, number, str(folder))


def test_plain_tokens_have_the_name_that_every_engine_gives_them():
    assert Prompts().of(request(), 5) == Prompt.of(range(5))


@pytest.mark.parametrize(
    "other",
    [
        {"mm_features": [image("b")]},
        {"mm_features": [image(offset=3)]},
        {"mm_features": [image(), image("b", 6, 1)]},
        {"mm_features": []},
        {"mm_features": [image()], "cache_salt": "salt"},
        {"mm_features": [image()], "prompt_embeds": torch.zeros(SIZE, HIDDEN)},
    ],
    ids=["another image", "elsewhere", "one more", "none", "a salt", "embeddings"],
)
def test_what_the_prefix_cache_tells_apart_is_told_apart(other):
    one = request(mm_features=[image()])
    assert accepts(one, request(mm_features=[image()]))
    assert not accepts(one, request(**other))
    assert not accepts(request(**other), one)


def test_an_image_that_begins_later_is_not_in_the_way():
    one, other = (request(mm_features=[image(name, 5, 2)]) for name in "ab")
    assert accepts(one, other, 5)
    assert not accepts(one, other, 6)


def test_a_salt_separates_what_is_alike():
    one, other = request(cache_salt="one"), request(cache_salt="other")
    assert (accepts(one, one), accepts(one, other), accepts(one, request())) == (True, False, False)


def test_embeddings_are_compared_one_by_one():
    embeddings = torch.rand(SIZE, HIDDEN)
    other = embeddings.clone()
    other[5] += 1
    one, another = (Request("r", None, SamplingParams(), None, prompt_embeds=each) for each in (embeddings, other))
    assert [accepts(one, another, num) for num in (1, 5, 6, SIZE)] == [True, True, False, False]
    assert not accepts(one, request([0] * SIZE))


def test_of_tokens_among_embeddings_the_ids_are_compared():
    are_ids, embeddings = [True, False] * (SIZE // 2), torch.zeros(SIZE, HIDDEN)
    made = {"prompt_embeds": embeddings, "prompt_is_token_ids": are_ids}
    assert accepts(request(**made), request(**made))
    assert not accepts(request(**made), request([9, *range(1, SIZE)], **made))
    assert not accepts(request(**made), request(**made | {"prompt_is_token_ids": [False] * SIZE}))


def test_embeddings_of_half_precision_have_names():
    embeddings = torch.rand(SIZE, HIDDEN).to(torch.bfloat16)
    one = Request("r", None, SamplingParams(), None, prompt_embeds=embeddings)
    one.append_output_token_ids([5])
    assert Prompts().of(one, SIZE + 1).num_tokens == SIZE + 1


def test_one_adapter_is_the_same_under_two_names_at_two_places(tmp_path):
    one, other = adapter(tmp_path / "a", "one", 1), adapter(tmp_path / "b", "other", 2)
    assert accepts(request(lora_request=one), request(lora_request=other))
    assert not accepts(request(lora_request=one), request())


@pytest.mark.parametrize("changed", [{"weights": b"others"}, {"rank": 16}])
def test_another_adapter_is_another_one_under_the_same_name(tmp_path, changed):
    one, other = adapter(tmp_path / "a"), adapter(tmp_path / "b", **changed)
    assert not accepts(request(lora_request=one), request(lora_request=other))


def limited(*modules):
    """Of an engine that applies its adapters to these modules only; to all without any."""
    config = SimpleNamespace(lora_config=SimpleNamespace(target_modules=list(modules) or None))
    return Prompts(adapted_modules=prompts.adapted_modules(config))


def test_an_adapter_of_which_an_engine_leaves_a_part_out_is_another_one(tmp_path):
    asked = request(lora_request=adapter(tmp_path / "a"))
    whole, part, same_part, other = limited(), limited("q", "v"), limited("v", "q", "v"), limited("q")
    name = part.of(asked, SIZE).name("lease")
    assert same_part.of(asked, SIZE).begins_with(name, "lease")
    assert not any(names.of(asked, SIZE).begins_with(name, "lease") for names in (whole, other))
    assert prompts.adapted_modules(SimpleNamespace(lora_config=None)) == ""
    assert whole.of(asked, SIZE) == Prompts().of(asked, SIZE)


def test_an_image_that_an_adapter_has_looked_at_is_named_without_the_adapters_name(tmp_path):
    one, other = (
        request(lora_request=adapter(tmp_path / name, name), mm_features=[image(f"{name}:a", mm_hash="a")])
        for name in ("one", "other")
    )
    assert accepts(one, other)
    assert not accepts(one, request(lora_request=one.lora_request, mm_features=[image("a")]))


def test_an_adapter_is_read_once(tmp_path, monkeypatch):
    names, tuned = Prompts(), adapter(tmp_path / "a")
    first = names.of(request(lora_request=tuned), SIZE)
    monkeypatch.setattr(adapters.hashlib, "file_digest", None)
    assert names.is_ready(request(lora_request=tuned))
    assert names.of(request(lora_request=tuned), SIZE) == first


def test_an_adapter_whose_files_have_been_replaced_has_no_name(tmp_path):
    names, tuned = Prompts(), adapter(tmp_path / "a")
    names.of(request(lora_request=tuned), SIZE)
    weights = tmp_path / "a" / "adapter_model.safetensors"
    before = weights.stat()
    adapter(tmp_path / "a", weights=b"changed")
    # As cp -p does, and whoever unpacks an archive in which all times are alike.
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (weights.stat().st_size, weights.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    with pytest.raises(RequestError, match="changed since they were read"):
        names.of(request(lora_request=tuned), SIZE)
    # Loaded again it has another number.
    assert names.of(request(lora_request=adapter(tmp_path / "a", number=2)), SIZE)


@pytest.mark.parametrize("path", ["/nowhere", "nobody/nothing", "not a repository: at all"])
def test_an_adapter_that_cannot_be_read_has_no_name(path):
    with pytest.raises(RequestError, match="cannot be read"):
        Prompts().of(request(lora_request=LoRARequest("tuned", 1, path)), SIZE)


@pytest.fixture
def slow():
    """An adapter's reader that has something else to do until the test is over."""
    names, is_over = Prompts(), threading.Event()
    names._adapters._reader.submit(is_over.wait)
    yield names
    is_over.set()


def test_an_adapter_that_takes_long_to_read_has_no_name_yet(tmp_path, monkeypatch, slow):
    asked = request(lora_request=adapter(tmp_path / "a"))
    monkeypatch.setattr(adapters, "WAIT_S", 0.0)
    assert slow.is_ready(asked)
    with pytest.raises(RequestError, match="still being read"):
        slow.of(asked, SIZE)


def test_nobody_has_to_wait_for_an_adapter_that_is_being_read(tmp_path, slow):
    tuned = adapter(tmp_path / "a")
    assert [slow.is_ready(request(lora_request=tuned)), slow.is_ready(request())] == [False, True]


def test_only_so_many_adapters_are_remembered(tmp_path, monkeypatch):
    monkeypatch.setattr(adapters, "MAX_KNOWN", 2)
    names = Prompts()
    for number in range(1, 5):
        names.of(request(lora_request=adapter(tmp_path / "a", number=number)), SIZE)
    assert [number for number, _ in names._adapters._readings] == [3, 4]


def test_images_that_are_only_numbered_have_no_name():
    names = Prompts(media_are_identified=False)
    assert names.of(request(), SIZE) == Prompt.of(range(SIZE))
    with pytest.raises(RequestError, match="no identifiers"):
        names.of(request(mm_features=[image()]), SIZE)


def test_media_outside_of_the_prompt_have_no_name():
    """As an encoder's input, which has no place among the tokens of the decoder."""
    with pytest.raises(RequestError, match="does not cover some"):
        Prompts().of(request(mm_features=[image(offset=0, length=0)]), SIZE)


def test_an_input_that_a_later_vllm_adds_has_no_name(monkeypatch):
    monkeypatch.setattr(prompts, "generate_block_hash_extra_keys", lambda *_: ((("token_types", "01"),), 0))
    with pytest.raises(RequestError, match="token_types"):
        Prompts().of(request(), SIZE)


def test_ids_that_are_none_have_no_name():
    with pytest.raises(RequestError, match="invalid token id"):
        Prompts().of(request([-1, 2]), 2)


@pytest.mark.parametrize(
    ("has_media", "cache_gb", "prefix_caching", "expected"),
    [(True, 4, False, True), (True, 0, True, True), (True, 0, False, False), (False, 0, False, False)],
)
def test_identifiers_are_digests_unless_both_caches_are_off(has_media, cache_gb, prefix_caching, expected):
    media = SimpleNamespace(mm_processor_cache_gb=cache_gb) if has_media else None
    config = SimpleNamespace(
        model_config=SimpleNamespace(multimodal_config=media),
        cache_config=SimpleNamespace(enable_prefix_caching=prefix_caching),
    )
    assert media_are_identified(config) == expected
