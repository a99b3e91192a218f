"""Servers of a test or a script: they end with it, and what they answer is compared."""

import re

import psutil
import pytest

from kvferry.errors import ConfigurationError, RequestError
from kvferry.testing.output_check import compare
from kvferry.testing.servers import running

pytestmark = pytest.mark.e2e


def children() -> set[int]:
    return {process.pid for process in psutil.Process().children(recursive=True)}


def test_what_one_engine_answers_is_equal_and_no_transfer():
    before = children()
    with running(("serve", "--port", "0", "--served-name", "tiny")) as (url,):
        found = compare(url, url, "tiny", "A short prompt")
        assert (found.equal, found.received, found.passed) == (True, False, False)
        assert found.answer.token_ids == found.alone.token_ids != ()
        with pytest.raises(RequestError, match=f"{re.escape(url)} refused the prompt; found: .*another"):
            compare(url, url, "another")
    assert children() <= before
    with pytest.raises(RequestError, match=r"no answer from http.*; found: .*refused"):
        compare(url, url, "tiny")


def test_all_end_when_one_cannot_start():
    before = children()
    with pytest.raises(ConfigurationError) as caught, running(("serve", "--port", "0"), ("route", "--port", "x")):
        pytest.fail("it cannot start")
    assert caught.value.what == "this did not start: kvferry route --port x"
    assert "--port" in caught.value.found
    assert children() <= before


def test_one_that_is_slow_is_not_waited_for_beyond_its_time():
    with (
        pytest.raises(ConfigurationError, match="the other process does not answer"),
        running(("serve", "--port", "0"), prefix=("sh", "-c", "exec cat", "sh"), ready_s=0.1),
    ):
        pytest.fail("it cannot start")


@pytest.mark.parametrize("line", ["ready", "7", "[1]", '{"address": "x"}'])
def test_one_that_says_something_else_has_not_started(line):
    with (
        pytest.raises(ConfigurationError, match=f"this did not start: kvferry serve; found: {re.escape(line)}"),
        running(("serve",), prefix=("sh", "-c", f"echo '{line}'; exec cat", "sh")),
    ):
        pytest.fail("it has no URL")


def test_a_program_that_is_not_there_starts_nothing():
    with (
        pytest.raises(ConfigurationError, match=r"this did not start: kvferry serve; found: .*No such file"),
        running(("serve",), prefix=("/no/such/program",)),
    ):
        pytest.fail("it cannot start")
