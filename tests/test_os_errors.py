"""What the operating system says reaches people without Python's words around it."""

import socket
import ssl
from urllib.error import URLError

import pytest

from kvferry.system import os_error_text


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (FileNotFoundError(2, "No such file or directory", "/nowhere"), "No such file or directory"),
        (ConnectionRefusedError(111, "Connect call failed ('127.0.0.1', 1)"), "Connection refused"),
        (URLError(ConnectionRefusedError(111, "Connection refused")), "Connection refused"),
        (socket.gaierror(-2, "Name or service not known"), "Name or service not known"),
        (ssl.SSLError(1, "[SSL] wrong version number"), "[SSL] wrong version number"),
        (URLError("unknown url type: foo"), "<urlopen error unknown url type: foo>"),
        (TimeoutError("timed out"), "timed out"),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"), "can't decode byte 0xff"),
        (ValueError("something else"), "something else"),
    ],
)
def test_only_the_systems_own_words_are_left(error, words):
    assert words in os_error_text(error)
    assert "Errno" not in os_error_text(error)
