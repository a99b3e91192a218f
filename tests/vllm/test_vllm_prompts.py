"""What identifies a prompt of vLLM: everything that vLLM's own prefix cache tells apart, and by content."""

import contextlib
import importlib
import json
import os
import threading
import warnings
from concurrent.futures import wait as wait_for
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

from kvferry.connectors.vllm.features import _names_kinds
from kvferry.connectors.vllm.scheduler import adapters, prompts
from kvferry.connectors.vllm.scheduler.adapters import AdapterNumbers, tell_of_loads
from kvferry.connectors.vllm.scheduler.prompts import Prompts, media_are_identified, media_options
from kvferry.errors import RequestError
from kvferry.plan.description.prompt import Prompt

SIZE, HIDDEN = 8, 4


@pytest.fixture(autouse=True)
def _adapters(request):
    """Who uses none has no files."""
    if not _names_kinds() and {"tmp_path", "path", "slow"} & set(request.fixturenames):
        pytest.skip("before vLLM 0.31 adapters have no names")


def image(identifier="a", offset=2, length=3, mm_hash=None):
    return MultiModalFeatureSpec(None, "image", identifier, PlaceholderRange(offset, length), mm_hash or identifier)


def request(tokens=tuple(range(SIZE)), **more):
    return Request("r", list(tokens), SamplingParams(), None, **more)


def name(names, asked, num_tokens=SIZE):
    """When the files of its adapter have been read."""
    if asked.lora_request is not None and not names.is_ready(asked):
        wait_for([names._adapters._readings[asked.lora_request.lora_path].digest])
    return names.of(asked, num_tokens)


def accepts(source, target, num_tokens=SIZE, names=None):
    """Whether what one engine has computed of a request is taken for the beginning of another's."""
    ours, theirs = (names, names) if names else (Prompts(), Prompts())
    return name(ours, source).begins_with(name(theirs, target, num_tokens).name("lease"), "lease")


def adapter(folder, called="tuned", number=1, weights=b"weights", rank=8):
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({"r": rank}))
    (folder / "adapter_model.safetensors").write_bytes(weights)
    return LoRARequest(called, number, str(folder))


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
    named = name(part, asked).name("lease")
    assert name(same_part, asked).begins_with(named, "lease")
    assert not any(name(names, asked).begins_with(named, "lease") for names in (whole, other))
    assert prompts.adapted_modules(SimpleNamespace(lora_config=None)) == ""
    assert name(whole, asked) == name(Prompts(), asked)


def test_an_image_that_an_adapter_has_looked_at_is_named_without_the_adapters_name(tmp_path):
    one, other = (
        request(lora_request=adapter(tmp_path / called, called), mm_features=[image(f"{called}:a", mm_hash="a")])
        for called in ("one", "other")
    )
    assert accepts(one, other)
    assert not accepts(one, request(lora_request=one.lora_request, mm_features=[image("a")]))


def test_an_adapter_is_read_once(tmp_path, monkeypatch):
    names, tuned = Prompts(), adapter(tmp_path / "a")
    first = name(names, request(lora_request=tuned))
    monkeypatch.setattr(adapters.hashlib, "file_digest", None)
    assert names.is_ready(request(lora_request=tuned))
    assert names.of(request(lora_request=tuned), SIZE) == first


def loaded(names, one):
    """As vLLM's engine core does when its server starts or is told to."""
    with names.loading(one):
        pass
    return one


SEEN = {
    "named": lambda names, one: name(names, request(lora_request=one)),
    "loaded": loaded,
    "asked for without a transfer": lambda names, one: names.begin(request(lora_request=one)),
}


@pytest.mark.parametrize("seen", SEEN)
@pytest.mark.parametrize("number", [1, 2], ids=["the same", "loaded again"])
def test_an_adapter_whose_files_have_been_replaced_has_no_name(tmp_path, seen, number):
    """Nor when it was unloaded and loaded again: vLLM's prefix cache has blocks of the first one under that path."""
    names, tuned = Prompts(), adapter(tmp_path / "a")
    SEEN[seen](names, tuned)
    weights = tmp_path / "a" / "adapter_model.safetensors"
    before = weights.stat()
    replaced = adapter(tmp_path / "a", weights=b"changed", number=number)
    # As cp -p does, and whoever unpacks an archive in which all times are alike.
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (weights.stat().st_size, weights.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    if number > 1:
        loaded(names, replaced)
    with pytest.raises(RequestError, match="changed since they were first seen"):
        name(names, request(lora_request=replaced))
    assert name(names, request(lora_request=adapter(tmp_path / "b", number=3)))


def test_what_could_not_be_loaded_may_be_written_anew(tmp_path):
    names, half = Prompts(), adapter(tmp_path / "a", weights=b"we")
    with pytest.raises(ValueError, match="half"), names.loading(half):
        raise ValueError("half written")
    whole = adapter(tmp_path / "a")
    assert accepts(request(lora_request=loaded(names, whole)), request(lora_request=whole), names=names)


def in_place(names, folder):
    """Two adapters that had one number, one after the other."""
    first, second = (adapter(folder / place, weights=place.encode()) for place in "ab")
    return loaded(names, first), second


def begun(names, one, request_id="r"):
    asked = Request(request_id, list(range(SIZE)), SamplingParams(), None, lora_request=one)
    names.begin(asked)
    return asked


def test_a_request_whose_adapter_is_replaced_in_its_place_has_no_name_any_more(tmp_path):
    names = Prompts()
    first, second = in_place(names, tmp_path)
    before = begun(names, first)
    assert name(names, before).inputs
    assert names.is_certain(before)
    loaded(names, second)
    assert not names.is_certain(before)
    loaded(names, first)
    assert not names.is_certain(before)
    with pytest.raises(RequestError, match="in its place"):
        name(names, before)


def test_one_of_the_adapter_in_place_has_a_name_when_no_other_goes_on_with_the_one_before(tmp_path):
    """vLLM may load the one before again for who still asks for it, and uses it for everybody in the same step."""
    names = Prompts()
    first, second = in_place(names, tmp_path)
    before = begun(names, first, "before")
    after = begun(names, loaded(names, second), "after")
    late = begun(names, first, "late")
    assert not names.is_certain(after)
    names.end(before)
    assert not names.is_certain(after)
    names.end(late)
    assert accepts(after, request(lora_request=second), names=names)


def test_a_request_that_comes_late_with_the_adapter_before_is_in_the_way_of_others(tmp_path):
    names = Prompts()
    first, second = in_place(names, tmp_path)
    after = begun(names, loaded(names, second), "after")
    assert name(names, after).inputs
    begun(names, first, "late")
    assert not names.is_certain(after)


def test_files_that_come_while_they_are_loaded_are_seen_then(tmp_path):
    """Those of a repository, which vLLM downloads."""
    names, missing = Prompts(), LoRARequest("tuned", 1, str(tmp_path / "a"))
    with names.loading(missing):
        adapter(tmp_path / "a")
    adapter(tmp_path / "a", weights=b"changed")
    with pytest.raises(RequestError, match="changed since"):
        name(names, request(lora_request=missing))


def test_vllm_tells_what_it_loads_before_it_loads_it(tmp_path):
    from vllm.v1.engine.core import EngineCore

    def load(adapter):
        events.append(adapter)
        raise OSError("no such adapter")

    class Names(Prompts):
        @contextlib.contextmanager
        def loading(self, adapter):
            events.append("told")
            with super().loading(adapter):
                yield

    events, tuned = [], adapter(tmp_path / "a")
    names = Names()
    for _ in range(2):
        tell_of_loads(names)
    with pytest.raises(OSError, match="no such"):
        EngineCore.add_lora(SimpleNamespace(model_executor=SimpleNamespace(add_lora=load)), tuned)
    assert events == ["told", tuned]
    executor = SimpleNamespace(add_lora=lambda adapter: True)
    assert EngineCore.add_lora(SimpleNamespace(model_executor=executor), tuned)


@pytest.mark.parametrize("path", ["/nowhere", "nobody/nothing", "not a repository: at all", "~no-such-user/nothing"])
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
        name(names, request(lora_request=adapter(tmp_path / f"{number}", number=number)))
    assert list(names._adapters._readings) == [f"{tmp_path}/3", f"{tmp_path}/4"]


def test_numbers_that_nobody_uses_are_forgotten_first(monkeypatch):
    monkeypatch.setattr(adapters, "MAX_KNOWN", 2)
    numbers = AdapterNumbers()
    first, second, third = (LoRARequest("tuned", number, f"/{number}") for number in (1, 2, 3))
    numbers.begin("r", first)
    for one in (second, third):
        numbers.load(one)
    assert list(numbers._numbers) == [1, 3]


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
    monkeypatch.setattr(prompts, "hash_inputs", lambda *_: [("token_types", "01")])
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


def options(**given):
    multimodal = {"mm_processor_kwargs": None, "media_io_kwargs": {}, "video_pruning_rate": None}
    multimodal = SimpleNamespace(**multimodal | {"video_pruning_method": "evs"} | given)
    return media_options(SimpleNamespace(model_config=SimpleNamespace(multimodal_config=multimodal)))


OPTIONS = [
    {"mm_processor_kwargs": {"do_resize": False}},
    {"media_io_kwargs": {"video": {"num_frames": 4}}},
    {"video_pruning_rate": 0.5},
    {"video_pruning_rate": 0.5, "video_pruning_method": "vidcom2"},
]


@pytest.mark.parametrize("given", OPTIONS, ids=str)
def test_an_image_that_two_engines_make_something_else_of_is_another_one(given):
    """vLLM's identifier has the options of the request, and not those of the engine."""
    seen, plain = request(mm_features=[image(offset=5, length=2)]), request()
    ours, theirs = (Prompts(media_options=options(**each)) for each in (given, {}))
    name = theirs.of(seen, SIZE).name("lease")
    assert not ours.of(seen, SIZE).begins_with(name, "lease")
    assert Prompts(media_options=options(**given)).of(seen, SIZE) == ours.of(seen, SIZE)
    assert ours.of(seen, SIZE).begins_with(theirs.of(seen, 5).name("lease"), "lease")
    assert ours.of(plain, SIZE) == theirs.of(plain, SIZE)


def test_without_options_media_have_the_names_that_they_have_in_vllm():
    assert (options(), options(mm_processor_kwargs={})) == ("", "")
    assert media_options(SimpleNamespace(model_config=SimpleNamespace(multimodal_config=None))) == ""
    one, other = options(mm_processor_kwargs={"a": 1, "b": 2}), options(mm_processor_kwargs={"b": 2, "a": 1})
    assert one == other


def test_several_images_are_told_apart_by_their_order_and_their_places():
    def seen(*at):
        return request(mm_features=[image(name, offset, 2) for name, offset in at])

    one = seen(("a", 1), ("b", 4))
    for other in (seen(("b", 1), ("a", 4)), seen(("a", 1), ("a", 4)), seen(("a", 1), ("b", 5)), seen(("a", 1))):
        assert not accepts(one, other)
        assert not accepts(other, one)
    assert accepts(one, seen(("a", 1), ("c", 4)), 4)
    assert accepts(one, seen(("a", 1), ("b", 4)))
