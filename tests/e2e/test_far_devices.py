"""The embedded engine, with a cache on a device whose memory nothing registers: caches go through staging memory."""

from pathlib import Path

import pytest
from chaos_support import GATED, Process, running
from conftest import post, prefilled
from test_main_job import prompt_of

FAR = Path(__file__).parents[1] / "far_serve.py"


def tokens(found):
    return found["choices"][0]["token_ids"]


@pytest.mark.parametrize(
    ("places", "allowed", "strategy"),
    [
        (("far", "far"), "auto", "pack"),
        pytest.param(("far", "near"), "auto", "pack", marks=pytest.mark.slow),
        # What the source has registered can be read as it lies there: whether that is cheaper depends on the machine.
        pytest.param(("near", "far"), "scatter", "scatter", marks=pytest.mark.slow),
    ],
)
def test_answers_are_those_without_a_transfer(places, allowed, strategy, tiny_model, tmp_path):
    engines = []
    for name, block_tokens, place in zip(("p0", "d0"), ("16", "32"), places, strict=True):
        words = ("serve", "--model", str(tiny_model), "--served-name", "tiny", "--engine-id", name)
        sizes = ("--num-blocks", "64", "--block-tokens", block_tokens, "--strategy", allowed)
        script = FAR if place == "far" else GATED
        engines.append(Process(tmp_path / f"{name}.log", *words, *sizes, script=script))
    source, target = engines
    with running(source, target):
        prompt = prompt_of(300, seed=1)
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 12, "return_token_ids": True}
        expected = tokens(post(f"{source.url}/v1/completions", body))
        found = post(f"{target.url}/v1/completions", body | {"kv_transfer_params": prefilled(source.url, prompt)})
        assert tokens(found) == expected
        report = found["kvferry"]
        assert (report["tokens_received"], report["tokens_computed"], report["strategy"]) == (299, 1, strategy)
