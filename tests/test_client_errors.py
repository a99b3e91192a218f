"""Errors on the way to an HTTP server, as people read them."""

import ssl
from types import SimpleNamespace

import aiohttp
import pytest

from kvferry.http.client_errors import client_error_text

WHERE = SimpleNamespace(host="here", port=1, ssl=True)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (aiohttp.ClientConnectorError(WHERE, OSError(111, "library's own words")), "here:1: Connection refused"),
        (aiohttp.ClientConnectorError(WHERE, OSError(-2, "Name or service not known")), "here:1: Name or service not"),
        (aiohttp.ClientConnectorSSLError(WHERE, ssl.SSLError(1, "[SSL] wrong version number")), "wrong version number"),
        (TimeoutError(), "TimeoutError"),
        (aiohttp.ClientPayloadError("x" * 500), "ClientPayloadError: xxx"),
    ],
)
def test_the_reason_is_named(error, words):
    assert words in client_error_text(error)
    assert len(client_error_text(error)) <= 200
