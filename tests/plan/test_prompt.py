"""The names of prompts: equal beginnings have equal names, and nothing else has."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.errors import RequestError
from kvferry.plan.prompt import UNKNOWN_PROMPT, UNNAMED, Prompt, PromptName

TOKENS = st.lists(st.integers(0, 3), max_size=6)
IDS = st.sampled_from(["lease", "lease2", "other"])


@given(TOKENS, TOKENS)
def test_a_prompt_begins_with_those_that_it_begins_with(whole, first):
    is_beginning = whole[: len(first)] == first or not (whole and first)
    assert Prompt.of(whole).begins_with(Prompt.of(first).name("lease"), "lease") == is_beginning


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1), IDS, IDS, st.text(), st.text())
def test_a_name_is_good_for_one_lease_and_one_context(tokens, lease_id, other_id, context, other_context):
    name = Prompt.of(tokens, context).name(lease_id)
    is_equal = (lease_id, context) == (other_id, other_context)
    assert Prompt.of(tokens, other_context).begins_with(name, other_id) == is_equal


def test_neither_what_is_read_as_one_nor_as_the_other_is_taken_for_equal():
    name = Prompt.of([1], "b").name("a")
    assert not Prompt.of([1], "").begins_with(name, "ab")


def test_what_is_not_known_is_not_in_the_way():
    assert UNKNOWN_PROMPT.name("lease") == UNNAMED
    assert Prompt.of([1]).begins_with(UNNAMED, "lease")
    assert UNKNOWN_PROMPT.begins_with(Prompt.of([1]).name("lease"), "lease")


def test_what_somebody_has_asked_is_not_in_a_traceback():
    assert "1234567" not in repr(Prompt.of([1234567])) + repr(Prompt(b"secret"))
    assert "secret" not in repr(Prompt(b"secret"))


@pytest.mark.parametrize("tokens", [[-1], [1 << 32], ["1"], [1.5]])
def test_what_is_no_token_is_refused(tokens):
    with pytest.raises(RequestError, match="not made of tokens"):
        Prompt.of(tokens)


@pytest.mark.parametrize(("num_tokens", "value"), [(-1, b""), (1 << 48, bytes(16)), (1, bytes(65))])
def test_what_is_no_name_is_refused(num_tokens, value):
    with pytest.raises(RequestError, match="the name of a prompt is none"):
        PromptName(num_tokens, value)
