"""The shared token at the command's edge: which file, and what is said before anything is started."""

import secrets

import pytest
from typer.testing import CliRunner

from kvferry import SharedToken
from kvferry.cli.main import app
from kvferry.cli.route.server import registration_of
from kvferry.cli.serve import embedded as command
from kvferry.http.registration import KEY_PURPOSE


@pytest.fixture
def token_file(tmp_path):
    path = tmp_path / "kvferry.token"
    path.touch(mode=0o600)
    path.write_text(secrets.token_hex(32))
    return path


@pytest.fixture
def served(monkeypatch):
    """Agents of what would be served; nothing is."""
    found = []
    monkeypatch.setattr(command, "serve", lambda options, settings, agent, access: found.append(agent))
    return found


def run(*arguments, **environment):
    environment = {"KVFERRY_TOKEN_FILE": ""} | {name: str(value) for name, value in environment.items()}
    return CliRunner().invoke(app, ["serve", "--model", ".", *map(str, arguments)], env=environment)


def test_without_a_token_there_is_none(served):
    assert run().exit_code == 0
    assert not served[0].token


def test_an_option_and_a_variable_name_the_file(served, token_file, tmp_path):
    assert run("--token-file", token_file, KVFERRY_TOKEN_FILE=tmp_path / "another").exit_code == 0
    assert run(KVFERRY_TOKEN_FILE=token_file).exit_code == 0
    secret = token_file.read_bytes()
    assert [each.token.secret for each in served] == [secret, secret]
    assert secret.decode() not in repr(served)


def test_beyond_this_host_a_token_is_needed_and_said_so_at_once(served, token_file):
    result = run("--transfer-host", "192.0.2.7")
    assert result.exit_code != 0
    assert "--token-file" in result.output
    assert served == []
    assert run("--transfer-host", "192.0.2.7", "--token-file", token_file).exit_code == 0
    assert served[0].host == "192.0.2.7"


def test_a_file_that_others_can_read_is_an_error_with_a_hint(served, token_file):
    token_file.chmod(0o644)
    result = run("--token-file", token_file)
    assert result.exit_code != 0
    assert "chmod 600" in result.output
    assert token_file.read_text() not in result.output
    assert served == []


def test_a_router_lets_in_who_uses_any_token_of_its_file(token_file):
    used, accepted = token_file.read_text(), secrets.token_hex(32)
    token_file.write_text(f"{used}\n{accepted}\n")
    keys = registration_of(True, str(token_file)).keys
    assert keys == tuple(SharedToken(each.encode()).derived(KEY_PURPOSE) for each in (used, accepted))
