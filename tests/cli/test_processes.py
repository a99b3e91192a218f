"""What `kvferry up` says of a child that does not come up."""

import time

import pytest

from kvferry.cli.processes import Child, Command
from kvferry.errors import ConfigurationError


@pytest.mark.parametrize("others", ["", "ValueError: no memory\n"])
def test_a_childs_own_error_is_told_and_where_others_have_said_more(tmp_path, others):
    log = tmp_path / "p0.log"
    log.write_text(others)
    child = Child(Command("p0", ("serve", "--transport", "pigeon"), log))
    try:
        with pytest.raises(ConfigurationError, match="p0: unknown transport") as raised:
            child.wait_until_ready(time.monotonic() + 60.0)
    finally:
        child.stop()
    assert raised.value.found == "pigeon"
    assert "measures all of them" in raised.value.hint
    assert (f"its whole output is in {log}" in raised.value.hint) == bool(others)
