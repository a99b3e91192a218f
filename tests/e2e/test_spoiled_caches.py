"""What has landed and was not found valid is used for nothing: not for its request, and not for any later one."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from chaos_support import Process, running
from conftest import post, prefilled
from test_main_job import prompt_of

SPOILING = Path(__file__).parents[1] / "spoiling_serve.py"


@pytest.fixture(scope="module")
def site(tiny_model, tmp_path_factory):
    """A prefill engine of which only noise comes, and a decode engine with few blocks, which are used again at once."""
    logs = tmp_path_factory.mktemp("spoiled")
    common = ("serve", "--model", str(tiny_model), "--served-name", "tiny", "--engine-id")
    source = Process(logs / "p0.log", *common, "p0", "--num-blocks", "64", script=SPOILING)
    target = Process(logs / "d0.log", *common, "d0", "--num-blocks", "64")
    source.gate.write_text("valid")
    with running(source, target):
        yield SimpleNamespace(source=source, target=target)


def answer(url, prompt, params=None):
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 12, "return_token_ids": True}
    return post(f"{url}/v1/completions", body | ({"kv_transfer_params": params} if params else {}))


def tokens(found):
    return found["choices"][0]["token_ids"]


def answer_of_decode(site, way, prompt):
    site.source.gate.write_text(way)
    return answer(site.target.url, prompt, prefilled(site.source.url, prompt))


@pytest.mark.parametrize(("way", "reason"), [("revoked", "expired"), ("digest", "digest")])
def test_what_is_not_valid_in_the_end_enters_no_answer(site, way, reason):
    prompt = prompt_of(200, seed=1)
    expected = tokens(answer(site.target.url, prompt))
    found = answer_of_decode(site, way, prompt)
    assert (tokens(found), found["kvferry"]["recomputed"]) == (expected, reason)
    assert [tokens(answer(site.target.url, prompt)) for _ in range(2)] == [expected] * 2


def test_noise_that_is_called_valid_would_be_noticed(site):
    prompt = prompt_of(200, seed=2)
    assert tokens(answer_of_decode(site, "valid", prompt)) != tokens(answer(site.target.url, prompt))
