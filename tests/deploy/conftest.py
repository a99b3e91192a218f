"""Charts that were rendered, and what `kvferry serve` makes of a container."""

import re

import pytest
import yaml
from chart_support import TOKEN, VALUES, helm
from typer.testing import CliRunner

from kvferry.cli import main


@pytest.fixture(scope="module")
def rendered():
    """The documents of a set of values, rendered once."""
    made = {}

    def rendered(name):
        if name not in made:
            done = helm("template", VALUES[name], "ferry", "--namespace", "inference")
            assert done.returncode == 0, done.stderr
            made[name] = [document for document in yaml.safe_load_all(done.stdout) if document]
        return made[name]

    return rendered


@pytest.fixture
def served(monkeypatch, tmp_path):
    """The engine and the options that `kvferry serve` reads from a container's command line.

    All of it is checked as at a start, up to the moment where the engine would be loaded.
    """
    given = {}
    monkeypatch.setattr("kvferry.cli.serve.command.check_engine", lambda *_: None)
    monkeypatch.setattr("kvferry.cli.models.resolve", lambda model: (model, model))
    monkeypatch.setattr("kvferry.cli.serve.vllm.serve_vllm", lambda options: given.update(vllm=options) or 0)
    monkeypatch.setattr("kvferry.cli.serve.sglang.serve_sglang", lambda options: given.update(sglang=options) or 0)
    monkeypatch.setattr("kvferry.cli.serve.embedded.serve", lambda options, *_: given.update(transformers=options))

    def served(container):
        token = tmp_path / "token"
        token.write_text(TOKEN)
        token.chmod(0o400)
        words = " ".join([*container["command"][1:], *container["args"]])
        known = {r"\$\(POD_IP\)": "127.0.0.1", r"\$\(POD_NAME\)": "ferry-0", r"/etc/kvferry/[\w.-]+": str(token)}
        for pattern, value in known.items():
            words = re.sub(pattern, value, words)
        result = CliRunner().invoke(main.app, words.split())
        assert result.exit_code == 0, result.output
        ((engine, options),) = given.items()
        return engine, options

    return served
