"""What `kvferry up` says of a child that does not come up."""

import time
import urllib.request

import pytest

from kvferry.cli.child_processes import Child
from kvferry.errors import ConfigurationError


@pytest.mark.parametrize("others", ["", "ValueError: no memory\n"])
def test_a_childs_own_error_is_told_and_where_others_have_said_more(tmp_path, others):
    log = tmp_path / "p0.log"
    # Of an earlier start.
    log.write_text("error: no device\n")
    child = Child("p0", ("serve", "--transport", "pigeon"), log)
    try:
        assert child.has_spoken(60.0)
        log.write_text("error: no device\n" + others + log.read_text().partition("\n")[2])
        with pytest.raises(ConfigurationError, match="p0: unknown transport") as raised:
            child.wait_until_ready(time.monotonic() + 60.0)
    finally:
        child.stop()
    assert raised.value.found == "pigeon"
    assert "measures all of them" in raised.value.hint
    assert (f"its full output is in {log}" in raised.value.hint) == bool(others)


def test_a_child_that_ends_without_a_word_of_its_own_has_ended(tmp_path):
    """Its output closes a moment before it is gone, and what it says last is what counts."""
    log = tmp_path / "p0.log"
    child = Child("p0", ("no-such-command",), log)
    log.write_text("Traceback\n  call()\n  ^^^^^^\nValueError: too late\n")
    try:
        with pytest.raises(ConfigurationError, match="p0 has exited \\(exit code 2\\)") as raised:
            child.wait_until_ready(time.monotonic() + 60.0)
    finally:
        child.stop()
    assert "^^^" not in raised.value.found


def test_a_child_whose_logs_were_cleaned_away_is_started_again_and_told_of(tmp_path):
    log = tmp_path / "logs" / "p0.log"
    child = Child("p0", ("no-such-command",), log)
    try:
        assert child.has_spoken(60.0)
        log.unlink()
        log.parent.rmdir()
        with pytest.raises(ConfigurationError, match=r"p0 has exited \(exit code 2\)"):
            child.wait_until_ready(time.monotonic() + 60.0)
    finally:
        child.stop()


def test_a_child_that_is_drained_is_given_the_time_to_end_by_itself(tmp_path):
    log = tmp_path / "router.log"
    child = Child("router", ("route", "--accept-registrations"), log, port=0)
    try:
        url = child.wait_until_ready(time.monotonic() + 60.0)["url"]
        # It takes signals in its own way once it answers.
        with urllib.request.urlopen(f"{url}/health", timeout=60.0) as response:
            assert response.status == 200
        child.drain(60.0)
        assert child.ending == "exit code 0"
    finally:
        child.stop()
    assert "drained: all open requests have ended" in log.read_text()
