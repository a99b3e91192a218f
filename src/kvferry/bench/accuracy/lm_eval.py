"""Runs lm-eval (EleutherAI's language model evaluation harness) against a server, as a process of its own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

from kvferry.bench.accuracy.client import Server
from kvferry.bench.accuracy.samples import Place, Sample, read_samples
from kvferry.errors import ConfigurationError

CHAT = "--apply_chat_template"
# Options of lm-eval that are about its tasks. Others would change what is asked of whom, or tell a third party of it.
ALLOWED = (
    *("--include_path", "--num_fewshot", "-f", CHAT, "--fewshot_as_multiturn", "--system_instruction"),
    *("--samples", "-E", "--seed", "--metadata", "--trust_remote_code", "--confirm_run_unsafe_code"),
)
SAMPLES = re.compile(r"samples_(?P<task>.+)_\d{4}-\d\d-\d\dT[\d.-]+\.jsonl")
# What is sent where no headers are given.
NO_HEADER = {"Accept": "application/json"}
HIDDEN = b"(hidden)"
PIECE_BYTES = 1 << 16


class EvaluationError(ConfigurationError):
    """lm-eval has not asked a server everything."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Tasks of lm-eval; `limit` is a number of documents of each, 0 for all. `arguments` are lm-eval's own, such as
    `--include_path` for the folder of a task that it does not know, and `environment` are its variables."""

    tasks: tuple[str, ...]
    limit: int = 0
    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)

    def check(self) -> None:
        """Raises ConfigurationError for an argument that would change what the options of this command say."""
        names = (word.partition("=")[0] for word in self.arguments if word.startswith("-"))
        if other := next((name for name in names if name not in ALLOWED), ""):
            expected = f"one of {', '.join(ALLOWED)}"
            raise ConfigurationError("this option of lm-eval is not passed on", found=other, expected=expected)

    def run(self, server: Server) -> dict[Place, Sample]:
        """Ask a server everything; what lm-eval warns of goes to stderr. Raises EvaluationError when it does not end
        well, and ConfigurationError when its samples are not what was asked for."""
        with tempfile.TemporaryDirectory(prefix="kvferry-lm-eval-") as folder:
            config, answers = Path(folder) / "config.yaml", Path(folder) / "answers"
            # YAML takes JSON.
            config.write_text(json.dumps(self.settings(server) | {"output_path": str(answers)}), encoding="utf-8")
            command = [sys.executable, "-m", "lm_eval", "run", "--config", str(config), *self.arguments]
            if code := _run(command, server, self.environment):
                hint = "lm-eval has said why above; a task of your own needs -- --include_path FOLDER"
                raise EvaluationError("lm-eval has not evaluated the server", found=f"exit code {code}", hint=hint)
            return read_folder(answers, server.salt)

    def settings(self, server: Server) -> dict[str, Any]:
        """A configuration of `lm_eval run`."""
        chat = CHAT in (word.partition("=")[0] for word in self.arguments)
        model: dict[str, Any] = {
            "model": server.model,
            "base_url": f"{server.url}/v1/{'chat/' if chat else ''}completions",
            "num_concurrent": server.at_once,
            "timeout": max(1, round(server.timeout_s)),
            # A request that fails is a fault of whoever was asked.
            "max_retries": 1,
            # The server has the tokenizer.
            "tokenizer_backend": None,
            "tokenized_requests": False,
            # Without any it would send the key of the user's account at OpenAI.
            "header": server.headers or NO_HEADER,
        }
        settings: dict[str, Any] = {
            "model": "local-chat-completions" if chat else "local-completions",
            "model_args": model,
            "tasks": list(self.tasks),
            # Runs share no prefix cache: a split that finds a prompt there moves nothing.
            "gen_kwargs": {"temperature": 0, "cache_salt": server.salt},
            "log_samples": True,
        }
        return settings | ({"limit": self.limit} if self.limit else {})


def read_folder(folder: Path, salt: str) -> dict[Place, Sample]:
    """What lm-eval has written of its tasks. Raises ConfigurationError where that is less than it has asked."""
    found: dict[Place, Sample] = {}
    for file in sorted(folder.rglob("samples_*.jsonl")):
        name = SAMPLES.fullmatch(file.name)
        with file.open(encoding="utf-8") as lines:
            found |= read_samples(name["task"] if name else file.stem, lines, salt)
    results = [json.loads(file.read_text(encoding="utf-8")) for file in folder.rglob("results_*.json")]
    asked = {task: count["effective"] for each in results for task, count in each.get("n-samples", {}).items()}
    for task, expected in asked.items():
        number = len({document for document, _ in found if document[0] == task})
        if number != expected:
            raise ConfigurationError(
                f"lm-eval has not saved all samples of {task}",
                found=str(number),
                expected=str(expected),
                hint="a name with a slash cannot be saved, nor can anything on a full disk",
            )
    if not found:
        raise EvaluationError("lm-eval has not evaluated the server", found="no samples")
    return found


def _run(command: list[str], server: Server, environment: Mapping[str, str]) -> int:
    """Run lm-eval and return its exit code. Its stderr, which shows requests that failed, is passed on without the
    values of the server's headers. Its stdout, which shows all settings, is dropped."""
    host = urlsplit(server.url).hostname or ""
    no_proxy = ",".join(filter(None, (environment.get("NO_PROXY", environment.get("no_proxy", "")), host)))
    told = {**environment, "LMEVAL_LOG_LEVEL": "WARNING", "NO_PROXY": no_proxy, "no_proxy": no_proxy}
    with ExitStack() as ended:
        process = subprocess.Popen(command, env=told, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        ended.enter_context(process)
        # Kill it whatever happens here. If it has ended by itself, this does nothing.
        ended.callback(process.kill)
        if process.stderr is not None:
            _pass_on(process.stderr, server.headers.values())
        return process.wait()


def _pass_on(words: IO[bytes], secrets: Iterable[str]) -> None:
    """Pass words on to stderr in lines, as a secret may come in two pieces. A progress bar ends lines with a return."""
    hidden = [part for secret in secrets for part in (secret, secret.removeprefix("Bearer ")) if part]
    rest = b""
    while piece := os.read(words.fileno(), PIECE_BYTES):
        *lines, rest = re.split(rb"(?<=[\r\n])", rest + piece)
        _say(lines, hidden)
    _say([rest], hidden)


def _say(lines: Iterable[bytes], hidden: Iterable[str]) -> None:
    text = b"".join(lines)
    for secret in hidden:
        text = text.replace(secret.encode(), HIDDEN)
    sys.stderr.write(text.decode(errors="replace"))
    sys.stderr.flush()
