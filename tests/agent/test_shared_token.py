"""Where the token comes from, and that it never goes anywhere."""

import errno
import os
import secrets

import pytest

from kvferry import AgentConfig, SharedToken, read_token
from kvferry.agent.control import shared_token
from kvferry.agent.control.shared_token import NO_TOKEN
from kvferry.errors import ConfigurationError

TOKEN = secrets.token_hex(32).encode()


@pytest.fixture
def token_file(tmp_path):
    def write(contents=TOKEN, mode=0o600):
        path = tmp_path / "kvferry.token"
        path.write_bytes(contents)
        path.chmod(mode)
        return str(path)

    return write


# Named: the token is another one each time.
@pytest.mark.parametrize(
    "contents", [TOKEN, TOKEN + b"\n", b" \t" + TOKEN + b"\r\n"], ids=["alone", "a line", "white space"]
)
def test_a_file_holds_a_token_and_perhaps_white_space(token_file, contents):
    assert read_token(token_file(contents)) == SharedToken(TOKEN)


OTHER = secrets.token_urlsafe(32).encode()


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b" \n\n\t"], ids=["lines", "windows", "white space"])
def test_the_first_line_is_used_and_the_others_are_accepted(token_file, end):
    found = read_token(token_file(TOKEN + end + OTHER + end))
    assert found == SharedToken(TOKEN, (OTHER,))
    assert found.each == (SharedToken(TOKEN), SharedToken(OTHER))
    assert found.derived(b"a") == SharedToken(TOKEN).derived(b"a")


@pytest.mark.parametrize("strange", [b"\0", b"\x7f", b"\xff"])
def test_a_line_break_among_random_bytes_is_one_of_them(token_file, strange):
    contents = TOKEN[:20] + b"\n" + strange + OTHER
    assert read_token(token_file(contents)) == SharedToken(contents)


def test_a_token_of_text_beside_one_of_any_bytes_is_refused(token_file):
    """Together they would be one token that nobody else has."""
    random = bytes(range(128, 168))
    for contents in (random + b"\n" + TOKEN, TOKEN + b"\n" + random):
        with pytest.raises(ConfigurationError, match=r"text and other bytes.*cannot be changed"):
            read_token(token_file(contents))


def test_each_of_several_tokens_is_checked(token_file):
    with pytest.raises(ConfigurationError, match=r"\(2 of 3\) could be guessed.*found: 5 bytes"):
        read_token(token_file(b"\n".join((TOKEN, b"short", OTHER))))
    with pytest.raises(ConfigurationError, match=r"\(1 of 2\) could be guessed.*found: 0 bytes"):
        SharedToken(accepted=(OTHER,))


def test_more_tokens_than_a_change_needs_are_a_mistake(token_file):
    """As of one that was wrapped."""
    four = [secrets.token_hex(32).encode() for _ in range(4)]
    assert len(read_token(token_file(b"\n".join(four))).each) == 4
    with pytest.raises(ConfigurationError, match=r"too many tokens.*5 lines.*into one line"):
        read_token(token_file(b"\n".join((*four, OTHER))))


def test_no_file_is_no_token():
    assert read_token("") == NO_TOKEN
    assert not NO_TOKEN


@pytest.mark.parametrize("mode", [0o400, 0o600, 0o440, 0o640])
def test_a_file_may_be_readable_by_its_group(token_file, mode):
    assert read_token(token_file(mode=mode))


def test_a_file_of_somebody_else_says_how_to_be_read(token_file, monkeypatch):
    """As root may read everything, the system says so in its place."""

    def refuse(path):
        raise PermissionError(errno.EACCES, "Permission denied", path)

    monkeypatch.setattr(shared_token, "_contents", refuse)
    with pytest.raises(ConfigurationError, match=r"cannot be read.*Permission denied.*group read it.*fsGroup"):
        read_token(token_file())


def test_a_file_that_is_not_there_says_how_to_make_one(tmp_path):
    with pytest.raises(ConfigurationError, match=r"cannot be read.*No such file.*openssl rand"):
        read_token(str(tmp_path / "none"))


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o660, 0o602, 0o666])
def test_a_file_that_others_can_read_or_change_is_refused(token_file, mode):
    with pytest.raises(ConfigurationError, match=rf"mode {mode:04o}.*hint: chmod 600"):
        read_token(token_file(mode=mode))


@pytest.mark.parametrize("contents", [b"short", b"a" * 64, b"ab" * 32, secrets.token_bytes(5000), b"x" * 31])
def test_a_token_that_could_be_guessed_is_refused(token_file, contents):
    with pytest.raises(ConfigurationError, match=r"could be guessed.*openssl rand"):
        read_token(token_file(contents))


def test_what_is_no_file_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe", 0o600)
    for path in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(ConfigurationError, match=r"is not a regular file|Is a directory"):
            read_token(str(path))


def test_a_missing_and_an_empty_file_are_refused(token_file, tmp_path):
    with pytest.raises(ConfigurationError, match=r"cannot be read.*No such file"):
        read_token(str(tmp_path / "missing"))
    with pytest.raises(ConfigurationError, match="is empty"):
        read_token(token_file(b"\n"))


def test_a_token_is_never_shown():
    token = SharedToken(TOKEN)
    for text in (repr(token), str(token), repr(AgentConfig("p0", token=token)), f"{token}"):
        assert TOKEN.decode() not in text
    with pytest.raises(ConfigurationError) as caught:
        SharedToken(b"typed by hand")
    assert "typed" not in str(caught.value)


def test_each_purpose_has_a_secret_of_its_own():
    one, other = SharedToken(TOKEN), SharedToken(TOKEN[::-1])
    assert len({one.derived(b"a"), one.derived(b"b"), other.derived(b"a"), TOKEN}) == 4
    assert one.derived(b"a") == SharedToken(TOKEN).derived(b"a")
