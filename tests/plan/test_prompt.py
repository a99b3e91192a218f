"""The names of prompts: equal beginnings have equal names, and nothing else has."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.errors import RequestError
from kvferry.plan.description.prompt import UNKNOWN_PROMPT, UNNAMED, Prompt, PromptInput, PromptName

TOKENS = st.lists(st.integers(0, 3), max_size=6)
IDS = st.sampled_from(["lease", "lease2", "other"])


@given(TOKENS, TOKENS)
def test_a_prompt_begins_with_those_that_it_begins_with(whole, first):
    is_beginning = whole[: len(first)] == first or not (whole and first)
    assert Prompt.of(whole).begins_with(Prompt.of(first).name("lease"), "lease") == is_beginning


@st.composite
def inputs(draw):
    """What besides tokens a cache depends on, with words that could run into one another."""
    words = st.text(alphabet="a1:;", max_size=3)
    made = st.builds(PromptInput, words, words, st.integers(0, 3))
    return tuple(draw(st.lists(made, max_size=3)))


@given(st.lists(st.integers(0, 2**32 - 1), min_size=4), IDS, IDS, inputs(), inputs())
def test_a_name_is_good_for_one_lease_and_equal_inputs(tokens, lease_id, other_id, some, others):
    name = Prompt.of(tokens, some).name(lease_id)
    is_equal = (lease_id, some) == (other_id, others)
    assert Prompt.of(tokens, others).begins_with(name, other_id) == is_equal


@given(st.integers(1, 6), st.integers(0, 6))
def test_only_what_lies_within_the_named_tokens_is_in_their_name(num_tokens, first_token):
    tokens, image = range(6), PromptInput("image", "a", first_token)
    name = Prompt.of(tokens, [image]).name("lease", num_tokens)
    assert name.num_tokens == num_tokens
    assert Prompt.of(tokens, [image]).begins_with(name, "lease")
    assert Prompt.of(tokens).begins_with(name, "lease") == (first_token >= num_tokens)


def test_the_name_of_plain_text_is_the_one_that_engines_in_service_give():
    assert Prompt.of([1, 2, 3]).name("lease").value.hex() == "dabe589f78de8dd5ed9a192eecece99e"


def test_embeddings_are_compared_and_are_no_tokens():
    ids = Prompt.of([7, 7]).tokens
    rows = [ids[4 * at : 4 * at + 4] + bytes([at] * 16) for at in range(2)]
    whole, first = Prompt(b"".join(rows), token_bytes=20), Prompt(rows[0], token_bytes=20)
    assert (whole.num_tokens, whole.begins_with(first.name("lease"), "lease")) == (2, True)
    assert not whole.begins_with(Prompt(rows[1], token_bytes=20).name("lease"), "lease")
    assert not Prompt(rows[0] * 5).begins_with(first.name("lease"), "lease")


def test_what_is_not_known_is_not_in_the_way():
    assert UNKNOWN_PROMPT.name("lease") == UNNAMED
    assert Prompt.of([1]).begins_with(UNNAMED, "lease")
    assert UNKNOWN_PROMPT.begins_with(Prompt.of([1]).name("lease"), "lease")


def test_what_somebody_has_asked_is_not_in_a_traceback():
    assert "1234567" not in repr(Prompt.of([1234567])) + repr(Prompt(b"secret"))
    assert "secret" not in repr(Prompt(b"secret")) + repr(Prompt.of([1], [PromptInput("salt", "secret")]))


@pytest.mark.parametrize("tokens", [[-1], [1 << 32], ["1"], [1.5]])
def test_what_is_no_token_is_refused(tokens):
    with pytest.raises(RequestError, match="invalid token id"):
        Prompt.of(tokens)


@pytest.mark.parametrize(("num_tokens", "value"), [(-1, b""), (1 << 48, bytes(16)), (1, bytes(65))])
def test_what_is_no_name_is_refused(num_tokens, value):
    with pytest.raises(RequestError, match="the name of a prompt is malformed"):
        PromptName(num_tokens, value)
