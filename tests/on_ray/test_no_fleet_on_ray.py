"""What `kvferry up --on ray` says where no cluster, or no router of ours, is to be found. No cluster is needed."""

from __future__ import annotations

import pytest

from kvferry.errors import ConfigurationError


@pytest.mark.parametrize("address", ["a..b:1", f"{'x' * 70}:1"])
def test_an_address_that_is_none_is_one_clear_message(address: str):
    from kvferry.cli.ray.fleet import _connect

    with pytest.raises(ConfigurationError, match="no Ray cluster can be used here") as caught:
        _connect(address)
    assert caught.value.found.startswith(f"{address}: ")
