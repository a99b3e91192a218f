"""Choosing tokens: the same seed the same tokens, whoever else is in the batch, and what a request forbids."""

from __future__ import annotations

import asyncio
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from embedded_support import Loop, collect, ids_of, request
from transformers import AutoModelForCausalLM, GenerationConfig, MoshiConfig, MoshiForCausalLM

from kvferry.connectors.jobs import Settings
from kvferry.connectors.sampling import GREEDY, Sampling
from kvferry.connectors.transformers import Core
from kvferry.embedded.engine.async_engine import Engine
from kvferry.embedded.engine.records import Request
from kvferry.errors import ConfigurationError, RequestError

DRAWN = Sampling(temperature=1.0, seed=7)


def ask(name: str, sampling: Sampling, num_new: int = 24, prompt_seed: int = 0) -> Request:
    return replace(request(name, 30, num_new, prompt_seed), sampling=sampling)


def answers(loop: Loop, engine: Engine, *requests: Request) -> list[list[int]]:
    async def run() -> list[list[int]]:
        return await asyncio.gather(*(ids_of(engine.generate(one)) for one in requests))

    return loop.run(run())


def test_a_seed_gives_the_same_tokens_whoever_else_is_there(loop: Loop, source: Engine, target: Engine) -> None:
    (alone,) = answers(loop, source, ask("alone", DRAWN))
    crowd = [ask(f"other-{i}", replace(DRAWN, seed=i), prompt_seed=i) for i in range(5)]
    beside = answers(loop, target, *crowd, ask("beside", DRAWN))[-1]
    (other,) = answers(loop, target, ask("another", replace(DRAWN, seed=8)))
    (greedy,) = answers(loop, target, ask("greedy", Sampling()))
    assert alone == beside
    assert len({tuple(tokens) for tokens in (alone, other, greedy)}) == 3


def test_tokens_are_drawn_as_often_as_the_model_says(loop: Loop, target: Engine) -> None:
    """Of 400 first tokens at a low temperature, about as many are the likeliest one as its probability says."""
    num_draws = 400
    likeliest = replace(DRAWN, temperature=0.5, logprobs=True, num_top_logprobs=5)
    requests = [ask(f"draw-{seed}", replace(likeliest, seed=seed), num_new=1) for seed in range(num_draws)]

    async def run() -> list[tuple[int, object]]:
        tokens = await asyncio.gather(*(collect(target.generate(one)) for one in requests))
        return [(drawn[0].token_id, drawn[0].scored) for drawn in tokens]

    drawn = loop.run(run())
    (probabilities,) = {tuple(logits_of(loop, target, ask("logits", Sampling(), num_new=1)))}
    expected = torch.tensor(probabilities).div(0.5).softmax(0)
    best = int(expected.argmax())
    share = sum(token_id == best for token_id, _ in drawn) / num_draws
    assert abs(share - float(expected[best])) < 5 * (0.25 / num_draws) ** 0.5


def logits_of(loop: Loop, engine: Engine, one: Request) -> list[float]:
    """The log-probabilities of the first token of an answer, by token."""
    everything = replace(one, sampling=Sampling(logprobs=True, num_top_logprobs=engine._core.vocab_size))
    (token,) = loop.run(collect(engine.generate(everything)))
    assert token.scored is not None
    by_id = {entry.token_id: entry.logprob for entry in token.scored.top}
    return [by_id[token_id] for token_id in range(engine._core.vocab_size)]


NARROW = {
    "top_k": replace(DRAWN, top_k=1),
    "top_p": replace(DRAWN, top_p=1e-6),
    "min_p": replace(DRAWN, min_p=1.0),
    "temperature": replace(DRAWN, temperature=1e-4),
    "almost no temperature": replace(DRAWN, temperature=1e-6),
}


@pytest.mark.parametrize("sampling", NARROW.values(), ids=NARROW)
def test_what_leaves_one_token_is_greedy(loop: Loop, target: Engine, sampling: Sampling) -> None:
    drawn, greedy = answers(loop, target, ask("drawn", sampling), ask("greedy", GREEDY))
    assert drawn == greedy


def test_temperature_flattens_and_the_filters_cut(loop: Loop, target: Engine) -> None:
    """All of a thousand draws are among the tokens that are left, and all of those are drawn."""
    logits = torch.tensor(logits_of(loop, target, ask("logits", GREEDY, num_new=1)))
    best = [int(token_id) for token_id in logits.topk(3).indices]
    hot = replace(DRAWN, temperature=50.0, top_k=3)
    drawn = answers(loop, target, *(ask(f"hot-{i}", replace(hot, seed=i), num_new=1) for i in range(60)))
    assert {tokens[0] for tokens in drawn} == set(best)


def test_a_bias_chooses_and_forbids(loop: Loop, target: Engine) -> None:
    (greedy,) = answers(loop, target, ask("greedy", GREEDY, num_new=4))
    chosen, forbidden = answers(
        loop,
        target,
        ask("chosen", Sampling(logit_bias=((77, 100.0),)), num_new=4),
        ask("forbidden", Sampling(logit_bias=tuple((token_id, -100.0) for token_id in set(greedy))), num_new=4),
    )
    assert chosen == [77] * 4
    assert not set(forbidden) & set(greedy)


def test_only_what_is_allowed_and_nothing_bad(loop: Loop, target: Engine) -> None:
    (greedy,) = answers(loop, target, ask("greedy", GREEDY, num_new=6))
    allowed, bad, pair = answers(
        loop,
        target,
        ask("allowed", Sampling(temperature=1.0, allowed_token_ids=(70, 80, 90)), num_new=12),
        ask("bad", Sampling(bad_words_ids=((greedy[0],),)), num_new=6),
        ask("pair", Sampling(bad_words_ids=(tuple(greedy[:2]),)), num_new=6),
    )
    assert set(allowed) <= {70, 80, 90}
    assert greedy[0] not in bad
    assert (pair[0], pair[1] != greedy[1]) == (greedy[0], True)


@pytest.mark.parametrize("penalty", [1.3, 0.8])
def test_the_repetition_penalty_is_transformers_own(
    loop: Loop, target: Engine, model_path: Path, penalty: float
) -> None:
    one = ask("penalised", Sampling(repetition_penalty=penalty))
    model = AutoModelForCausalLM.from_pretrained(model_path)
    config = GenerationConfig(do_sample=False, repetition_penalty=penalty, max_new_tokens=24, eos_token_id=-1)
    expected = model.generate(torch.tensor([one.prompt]), config, pad_token_id=0)[0, 30:].tolist()
    assert answers(loop, target, one) == [expected]


def test_penalties_count_what_was_answered(loop: Loop, target: Engine) -> None:
    """Two tokens that are likelier than all others take turns, or one of them goes on, as their counts say."""
    pair = Sampling(logit_bias=((70, 50.0), (71, 50.0)))
    never, presence, frequency = answers(
        loop,
        target,
        ask("never", Sampling(logit_bias=((70, 50.0),)), num_new=6),
        ask("presence", replace(pair, presence_penalty=2.0, logit_bias=((70, 51.0), (71, 50.0))), num_new=40),
        ask("frequency", replace(pair, frequency_penalty=2.0), num_new=40),
    )
    assert never == [70] * 6
    assert set(presence) == {70, 71}
    assert abs(frequency.count(70) - frequency.count(71)) <= 4


def test_an_answer_does_not_stop_before_its_least_length(loop: Loop, target: Engine) -> None:
    (greedy,) = answers(loop, target, ask("greedy", GREEDY, num_new=3))
    stops = frozenset(greedy)
    short, long = answers(
        loop,
        target,
        replace(ask("short", GREEDY, num_new=40), stop_token_ids=stops),
        replace(ask("long", Sampling(min_tokens=5), num_new=40), stop_token_ids=stops),
    )
    assert len(short) == 1
    assert len(long) >= 5
    assert not stops & set(long[:5])


def test_a_request_that_forbids_everything_fails_alone(loop: Loop, target: Engine) -> None:
    stuck = ask("stuck", Sampling(allowed_token_ids=(70,), bad_words_ids=((70,),)))

    async def run() -> list[object]:
        both = (ids_of(target.generate(one)) for one in (stuck, ask("beside", GREEDY)))
        return await asyncio.gather(*both, return_exceptions=True)

    refused, beside = loop.run(run())
    assert isinstance(refused, RequestError)
    assert "no token to go on with" in str(refused)
    assert [beside] == answers(loop, target, ask("alone", GREEDY))


@pytest.mark.parametrize("penalty", [1e-36, 1e6])
def test_a_request_whose_penalties_leave_no_finite_odds_fails_alone(loop: Loop, target: Engine, penalty: float) -> None:
    """Drawing from odds that are no numbers raises an error that would end the step of everybody."""
    extreme = ask("extreme", replace(DRAWN, temperature=1e-5, repetition_penalty=penalty))

    async def run() -> list[object]:
        both = (ids_of(target.generate(one)) for one in (extreme, ask("beside", GREEDY)))
        return await asyncio.gather(*both, return_exceptions=True)

    ended, beside = loop.run(run())
    assert isinstance(ended, (RequestError, list))
    assert isinstance(ended, RequestError) or penalty > 1
    assert [beside] == answers(loop, target, ask("alone", GREEDY))


def test_what_only_says_how_to_draw_leaves_a_greedy_request_to_the_fast_way() -> None:
    assert replace(GREEDY, seed=7, top_p=0.9, top_k=50, min_p=0.1).is_greedy
    for other in (
        DRAWN,
        replace(GREEDY, logprobs=True),
        replace(GREEDY, min_tokens=3),
        replace(GREEDY, logit_bias=((1, 2.0),)),
    ):
        assert not other.is_greedy


def test_log_probabilities_are_the_model_s_own(loop: Loop, target: Engine, model_path: Path) -> None:
    one = ask("scored", replace(DRAWN, temperature=0.3, top_k=2, logprobs=True, num_top_logprobs=3), num_new=5)
    tokens = loop.run(collect(target.generate(one)))
    ids = [token.token_id for token in tokens]
    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(model_path)
        expected = model(torch.tensor([[*one.prompt, *ids]])).logits[0, 29:-1].log_softmax(-1)
    for token, row in zip(tokens, expected, strict=True):
        assert token.scored is not None
        assert token.scored.chosen.token_id == token.token_id
        assert token.scored.chosen.logprob == pytest.approx(float(row[token.token_id]), abs=1e-4)
        assert [entry.token_id for entry in token.scored.top] == row.topk(3).indices.tolist()


def test_a_vocabulary_has_an_end(loop: Loop, target: Engine) -> None:
    for sampling in (Sampling(logit_bias=((1024, 1.0),)), Sampling(allowed_token_ids=(-1,))):
        with pytest.raises(RequestError, match="is not in the model's vocabulary"):
            answers(loop, target, ask("beyond", sampling))


def test_a_vocabulary_ends_where_the_logits_do(loop: Loop, model_path: Path, tmp_path: Path) -> None:
    """This model reads one more token than it can answer with."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 128}
    config = MoshiConfig(vocab_size=1024, max_position_embeddings=256, sliding_window=256, pad_token_id=1024, **sizes)
    MoshiForCausalLM(config).save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 1024]}')
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model_path / name, tmp_path / name)
    engine = Engine(Settings(str(tmp_path), num_blocks=64))
    assert engine._core._model.get_input_embeddings().weight.shape[0] == 1025
    assert max(engine.stop_token_ids) < 1024
    beyond = Request("p", (4, 1024), 2, frozenset(), Sampling(repetition_penalty=1.1))
    for one in (beyond, ask("a", Sampling(allowed_token_ids=(1024,)))):
        with pytest.raises(RequestError, match="expected: 0 <= id < 1024"):
            engine.limits.check(one)
    engine.limits.check(ask("last", Sampling(allowed_token_ids=(1023,))))
    loop.run(engine.close())


DEFAULTS = {
    "nothing said": ({}, Sampling(temperature=1.0)),
    "authors": ({"do_sample": True, "temperature": 0.6, "top_k": 20}, Sampling(temperature=0.6, top_k=20)),
    "greedy": ({"do_sample": False, "repetition_penalty": 1.1}, Sampling(repetition_penalty=1.1)),
    # transformers takes a whole number for a mistake.
    "whole number": ({"do_sample": True, "repetition_penalty": 2}, Sampling(temperature=1.0, repetition_penalty=2.0)),
}


def saying(said: dict[str, object], model_path: Path, folder: Path) -> Settings:
    """The model there, with another generation_config.json."""
    for file in model_path.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    (folder / "generation_config.json").write_text(json.dumps(said))
    return Settings(str(folder), num_blocks=8)


@pytest.mark.parametrize(("said", "expected"), DEFAULTS.values(), ids=DEFAULTS)
def test_the_model_s_authors_decide_what_a_request_leaves_open(
    model_path: Path, tmp_path: Path, said: dict[str, object], expected: Sampling
) -> None:
    core = Core(saying(said, model_path, tmp_path), print)
    assert core.default_sampling == expected
    core.stop()


@pytest.mark.parametrize("said", [{"min_p": 2}, {"top_k": 0.5}, {"repetition_penalty": -1.0}], ids=str)
def test_what_no_request_could_say_is_refused_at_start(
    model_path: Path, tmp_path: Path, said: dict[str, object]
) -> None:
    """The first request would end the engine's thread."""
    with pytest.raises(ConfigurationError, match=r"generation_config\.json"):
        Core(saying(said, model_path, tmp_path), print)


def test_an_answer_ends_with_the_tokenizers_end_as_well(model_path: Path, tmp_path: Path) -> None:
    """A chat model's may be another one than its base model's, which the file may still name."""
    core = Core(saying({"eos_token_id": [7, 9]}, model_path, tmp_path), print)
    assert core.stop_token_ids == {7, 9, core.tokenizer.eos_token_id}
    core.stop()
