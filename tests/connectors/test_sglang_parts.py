"""What SGLang's connector does with pools, first tokens, prompts and settings, where no SGLang is needed."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch

from kvferry import FirstToken, Prompt, PromptInput, Reason
from kvferry.connectors.sglang import handoff
from kvferry.connectors.sglang.description.describe import RankFacts, describe
from kvferry.connectors.sglang.description.parts import Part
from kvferry.connectors.sglang.features import forward_stream_of
from kvferry.connectors.sglang.prompt import prompt_of
from kvferry.connectors.sglang.settings import VARIABLE, settings_from
from kvferry.errors import ConfigurationError, LayoutError, TransferError
from kvferry.layout import State

PAGE_SIZE, NUM_PAGES, NUM_HEADS, HEAD_DIM, NUM_LAYERS = 4, 6, 2, 8, 2
FACTS = RankFacts(0, 1, NUM_HEADS)


class MHATokenToKVPool:
    """As SGLang's; a test says how it differs."""

    def __init__(self, **changes) -> None:
        shape = NUM_PAGES * PAGE_SIZE, NUM_HEADS, HEAD_DIM
        self.page_size, self.start_layer, self.head_num = PAGE_SIZE, 0, NUM_HEADS
        self.kv_cache_layout, self.dtype = "nhd", torch.float32
        self.k_buffer, self.v_buffer = ([torch.empty(shape) for _ in range(NUM_LAYERS)] for _ in "kv")
        vars(self).update(changes)
        self.layer_num = len(self.k_buffer)


class TestDescription:
    def test_a_pipeline_stage_has_the_layers_that_it_has(self):
        layout = describe(MHATokenToKVPool(start_layer=5), FACTS).layout
        names = [f"model.layers.{layer}.{kind}" for layer in (5, 6) for kind in "kv"]
        assert [state.name for state in layout.states] == names

    def test_keys_are_keys_and_rows_belong_to_tokens(self):
        pool = MHATokenToKVPool()
        layout = describe(pool, FACTS).layout
        starts = {p.state: layout.regions[p.region].address + p.offset for p in layout.placements}
        assert starts["model.layers.1.k"] == pool.k_buffer[1].data_ptr()
        assert starts["model.layers.1.v"] == pool.v_buffer[1].data_ptr()
        assert all(state.per_token for state in layout.states)

    def test_pages_are_blocks_whose_end_may_be_written(self):
        shorter = [torch.empty(5 * PAGE_SIZE, NUM_HEADS, HEAD_DIM) for _ in range(NUM_LAYERS)]
        layout = describe(MHATokenToKVPool(v_buffer=shorter), FACTS).layout
        (group,) = layout.groups
        assert (group.block_tokens, group.num_blocks, group.tail_is_free) == (PAGE_SIZE, 5, True)

    @pytest.mark.parametrize(("device", "kind"), [("cpu", "dram"), ("meta", "vram")])
    def test_memory_of_a_device_is_called_that(self, device, kind):
        state, regions = State("k", "float32", 4, (), per_token=True), {}
        part = Part(state, torch.empty(8, device=device), (), (), block_stride=16, token_stride=4)
        part.placement(regions, 0)
        assert [region.kind for region in regions.values()] == [kind]

    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({"k_buffer": [], "v_buffer": []}, "keeps no layer; found: MHATokenToKVPool"),
            ({"kv_cache_layout": "hnd"}, "not arranged token by token; found: hnd"),
            ({"k_buffer": [torch.empty(24, HEAD_DIM, NUM_HEADS).mT] * 2}, "not contiguous; found: model.layers.0.k"),
            (
                {"k_scale_buffer": [torch.empty(24)]},
                "numbers beside its keys and values; found: torch.float32, k_scale_buffer",
            ),
            ({"head_num": 1}, "not divided evenly among the ranks; found: 1 heads"),
        ],
    )
    def test_what_cannot_be_described_is_refused(self, changes, words):
        with pytest.raises(LayoutError, match=words):
            describe(MHATokenToKVPool(**changes), FACTS)


@pytest.fixture
def rows():
    """SGLang's buffers of first tokens, full of what others have left there."""
    return SimpleNamespace(
        output_ids=torch.full((2, 16), 9, dtype=torch.int32),
        cached_tokens=torch.full((2, 16), 9, dtype=torch.int32),
        output_token_logprobs_idx=torch.full((2, 16), 9, dtype=torch.int32),
        output_token_logprobs_val=torch.full((2, 16), 9.0),
        output_top_logprobs_idx=torch.full((2, 16), 9, dtype=torch.int32),
        output_top_logprobs_val=torch.full((2, 16), 9.0),
        bootstrap_room=torch.full((2, 8), 9, dtype=torch.int64),
    )


class TestFirstToken:
    @pytest.mark.parametrize(
        "first", [FirstToken(17), FirstToken(17, -0.5), FirstToken(17, -0.5, ((17, -0.5), (3, -2.0)))]
    )
    def test_what_is_written_into_a_row_is_read_from_it(self, rows, first):
        handoff.write(rows, 1, first, 77)
        assert handoff.read(rows, 1, handoff.num_logprobs_of(first)) == first
        assert (int(rows.bootstrap_room[1, 0]), rows.bootstrap_room[0].tolist()) == (77, [9] * 8)

    def test_nothing_of_an_earlier_request_is_left_in_a_row_and_no_other_row_is_touched(self, rows):
        handoff.write(rows, 1, FirstToken(17), 77)
        assert rows.output_top_logprobs_idx[1].tolist() == [0] * 16
        assert rows.output_top_logprobs_val[1].tolist() == [0.0] * 16
        assert (rows.output_token_logprobs_idx[1, 0], rows.output_token_logprobs_val[1, 0]) == (17, 0.0)
        assert rows.cached_tokens[1].tolist() == [0] * 16
        assert all((each[0] == 9).all() for each in vars(rows).values())

    def test_a_row_that_could_not_be_filled_is_not_taken_for_its_rooms(self, rows):
        with pytest.raises(RuntimeError):
            handoff.write(rows, 1, FirstToken(1 << 31), 77)
        assert int(rows.bootstrap_room[1, 0]) == 9

    @pytest.mark.parametrize(
        ("first", "wanted", "found"),
        [
            (FirstToken(17), (False, 3), (0, 0)),
            (FirstToken(17, -0.5), (True, 0), (1, 1)),
            (FirstToken(17, -0.5, ((3, -2.0),)), (True, 5), (6, 2)),
        ],
    )
    def test_log_probabilities_that_are_wanted_and_that_have_come_are_counted_alike(self, first, wanted, found):
        asked = SimpleNamespace(return_logprob=wanted[0], logprob=SimpleNamespace(top_logprobs_num=wanted[1]))
        rows = SimpleNamespace(output_top_logprobs_val=torch.empty(1, 128))
        assert (handoff.num_logprobs_wanted(asked, rows), handoff.num_logprobs_of(first)) == found

    def test_log_probabilities_are_read_only_where_they_are_wanted(self, rows):
        assert handoff.read(rows, 0, 0) == FirstToken(9)


class TestPrompts:
    def request(self, **changes):
        plain = {"multimodal_inputs": None, "input_embeds": None, "return_sampling_mask": False}
        return SimpleNamespace(
            **plain | {"extra_key": None, "cache_salt": None, "origin_input_ids": [1, 2, 3]} | changes
        )

    def test_each_thing_that_sglang_tells_caches_apart_by_makes_another_name(self):
        changes = [
            {},
            {"extra_key": "a"},
            {"cache_salt": "a"},
            {"cache_salt": "b"},
            {"extra_key": "a", "cache_salt": "a"},
        ]
        changes += [{"origin_input_ids": [1, 2, 4]}]
        names = {prompt_of(self.request(**each)).name("lease") for each in changes}
        assert len(names) == len(changes)
        assert prompt_of(self.request()).num_tokens == 3

    def test_what_any_engine_has_a_word_for_is_called_that(self):
        salted = Prompt.of([1, 2, 3], [PromptInput("salt", "a")])
        assert prompt_of(self.request(cache_salt="a")).name("lease") == salted.name("lease")

    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({"multimodal_inputs": object()}, "images and embeddings"),
            ({"input_embeds": [[0.5]]}, "images and embeddings"),
            ({"return_sampling_mask": True}, "sampling mask"),
        ],
    )
    def test_what_has_no_name_is_refused(self, changes, words):
        with pytest.raises(TransferError, match=words) as raised:
            prompt_of(self.request(**changes))
        assert raised.value.reason == Reason.UNNAMED_PROMPT


class TestForwardStream:
    @pytest.mark.parametrize("overlaps", [True, False])
    def test_it_is_the_schedulers(self, overlaps):
        assert forward_stream_of(SimpleNamespace(enable_overlap=overlaps, forward_stream="forwards")) == "forwards"

    def test_without_one_the_current_stream_is_it(self):
        assert forward_stream_of(SimpleNamespace(enable_overlap=False)) is None

    @pytest.mark.parametrize("facts", [{}, {"enable_overlap": True}])
    def test_an_sglang_that_does_not_say_it_is_refused(self, facts):
        with pytest.raises(ConfigurationError, match="when SGLang is done with the pages"):
            forward_stream_of(SimpleNamespace(**facts))


@pytest.mark.parametrize("found", ["{", "[]", '{"hosts": ""}', '{"lease_s": 0}', '{"staging_bytes": 0}', '{"host": 1}'])
def test_settings_that_cannot_be_read_are_refused_with_the_names_of_all(found):
    with pytest.raises(ConfigurationError, match=f"{VARIABLE} cannot be read.*engine_id, host, token_file"):
        settings_from({VARIABLE: found})


def test_settings_are_read():
    said = {"host": "10.0.0.5", "lease_s": 7, "staging_memory": "device"}
    settings = settings_from({VARIABLE: json.dumps(said)})
    assert {name: getattr(settings, name) for name in said} == said
    assert (settings_from({}).host, settings_from({}).lease_s) == ("127.0.0.1", 30.0)
