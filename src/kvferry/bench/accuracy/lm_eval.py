"""Runs lm-eval (EleutherAI's language model evaluation harness) against a server, as a process of its own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvferry.bench.accuracy.client import Server
from kvferry.bench.accuracy.samples import Place, Sample, read_samples
from kvferry.errors import ConfigurationError

CHAT = "--apply_chat_template"
# What this module decides; it would be wrong to have it in two ways.
OURS = ("--config", "-C", "--model", "-M", "--model_args", "-a", "--tasks", "-t", "--gen_kwargs")
OURS_TOO = ("--output_path", "-o", "--log_samples", "-s", "--use_cache", "-c")
SAMPLES = re.compile(r"samples_(?P<task>.+)_\d{4}-\d\d-\d\dT[\d.-]+\.jsonl")


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Tasks of lm-eval; `limit` is a number of documents of each, 0 for all. `arguments` are lm-eval's own, such as
    `--include_path` for the folder of a task that it does not know."""

    tasks: tuple[str, ...]
    limit: int = 0
    arguments: tuple[str, ...] = ()

    def check(self) -> None:
        """Raises ConfigurationError for an argument that says what the options of this command say."""
        names = (word.partition("=")[0] for word in self.arguments)
        if twice := next((name for name in names if name in (*OURS, *OURS_TOO)), ""):
            expected = "options of lm-eval that are about its tasks, such as --include_path or --num_fewshot"
            raise ConfigurationError("this option of lm-eval is set by kvferry", found=twice, expected=expected)

    def run(self, server: Server) -> dict[Place, Sample]:
        """Ask a server everything; what lm-eval warns of goes to stderr. Raises ConfigurationError when it does not end
        well."""
        with tempfile.TemporaryDirectory(prefix="kvferry-lm-eval-") as folder:
            config, answers = Path(folder) / "config.yaml", Path(folder) / "answers"
            # YAML takes JSON.
            config.write_text(json.dumps(self.settings(server) | {"output_path": str(answers)}), encoding="utf-8")
            command = [sys.executable, "-m", "lm_eval", "run", "--config", str(config), *self.arguments]
            # What it says beside its warnings has all settings in it, and with them the API key.
            environment = {**os.environ, "LMEVAL_LOG_LEVEL": "WARNING"}
            code = subprocess.run(command, stdout=subprocess.DEVNULL, env=environment, check=False).returncode
            files = sorted(answers.rglob("samples_*.jsonl"))
            if code or not files:
                raise ConfigurationError(
                    "lm-eval has not evaluated the server",
                    found=f"exit code {code}" if code else "no samples",
                    expected="tasks that generate text (output_type: generate_until)",
                    hint="lm-eval has said why above; a task of your own needs -- --include_path FOLDER",
                )
            return read_files(files)

    def settings(self, server: Server) -> dict[str, Any]:
        """A configuration of `lm_eval run`."""
        chat = CHAT in (word.partition("=")[0] for word in self.arguments)
        model: dict[str, Any] = {
            "model": server.model,
            "base_url": f"{server.url}/v1/{'chat/' if chat else ''}completions",
            "num_concurrent": server.at_once,
            "timeout": max(1, round(server.timeout_s)),
            # The server has the tokenizer.
            "tokenizer_backend": None,
            "tokenized_requests": False,
        }
        if server.headers:
            model["header"] = server.headers
        settings: dict[str, Any] = {
            "model": "local-chat-completions" if chat else "local-completions",
            "model_args": model,
            "tasks": list(self.tasks),
            # Runs share no prefix cache: a split that finds a prompt there moves nothing.
            "gen_kwargs": {"temperature": 0, "cache_salt": server.salt},
            "log_samples": True,
        }
        return settings | ({"limit": self.limit} if self.limit else {})


def read_files(files: Sequence[Path]) -> dict[Place, Sample]:
    """What lm-eval has written of each of its tasks."""
    found: dict[Place, Sample] = {}
    for file in files:
        name = SAMPLES.fullmatch(file.name)
        with file.open(encoding="utf-8") as lines:
            found |= read_samples(name["task"] if name else file.stem, lines)
    return found
