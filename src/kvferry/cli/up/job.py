"""`kvferry up`: the whole job on one machine, with the proof that it was done right."""

from __future__ import annotations

import shutil
import signal
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from kvferry.cli import console, environment
from kvferry.cli.models import TINY, resolve
from kvferry.cli.options import option_of
from kvferry.cli.up.command import UpOptions
from kvferry.cli.up.engine_report import read, report_between, why_chosen
from kvferry.cli.up.fleet import READY_S, Fleet, FleetOptions
from kvferry.cli.up.output_check import Answer, Question, ask
from kvferry.errors import ConfigurationError, FerryError
from kvferry.system import os_error_text

EXAMPLE = (
    "The ferry leaves the harbour at dawn. On the other side of the river a train is waiting, and whoever wants to "
    "catch it must not lose a single box on the way. The captain counts the boxes, the porter counts them again, and"
)
CHECK_S = 1.0
LARGE_BYTES = 1 << 20
VERIFIED = {
    "sampled": "its lease, and a sample of its bytes",
    "full": "its lease, and every byte",
    "off": "its lease",
    "unreadable": "its lease only: the CPU cannot read its memory",
}
VLLM_READY_S = 900.0
# The first time, a model of the Hub is downloaded by the engines.
DOWNLOAD_READY_S = 3600.0
# A prefix cache would answer the second question from what the first one has moved.
SALTS = ("kvferry-together", "kvferry-alone")


def up(options: UpOptions) -> int:
    """Run it; returns the exit code: 0 when the answers are equal. Raises ConfigurationError, RequestError."""
    # A shell without job control has its background jobs ignore SIGINT: whoever ends the script means this, too.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    # It comes when the terminal is closed, and nohup has it ignored.
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.default_int_handler)
    path, name = resolve(options.model)
    logs = _log_folder(options.log_dir)
    useful = options.log_dir
    try:
        environment.share_api_key()
        with Fleet(_fleet_options(options, path, name), logs) as fleet:
            return _run(options, fleet)
    except FerryError as error:
        useful += str(error)
        raise
    finally:
        # What the user has chosen stays, and what an error tells to look into.
        if str(logs) not in useful:
            shutil.rmtree(logs, ignore_errors=True)


def _log_folder(path: str) -> Path:
    """A new one in the temporary folder, if none is named. Raises ConfigurationError when it cannot be made."""
    try:
        folder = Path(path or tempfile.mkdtemp(prefix="kvferry-"))
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        hint = "--log-dir takes a folder and creates it if needed"
        raise ConfigurationError(
            "cannot create the log folder",
            found=f"{path or tempfile.gettempdir()}: {os_error_text(error)}",
            expected="a folder",
            hint=hint,
        ) from error
    return folder


def _run(options: UpOptions, fleet: Fleet) -> int:
    is_serving = False
    try:
        engines = f"{options.prefill} prefill and {options.decode} decode"
        console.say(f"starting {engines} engines and a router")
        fleet.start()
        equal = _show_proof(options, fleet)
        if options.once is None:
            is_serving = True
            _keep_serving(fleet)
    except KeyboardInterrupt:
        # Whoever presses Ctrl-C twice must not leave half of the children behind.
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        with suppress(OSError):
            # The terminal may be gone.
            console.say(f"stopping: waiting for {fleet.names} to end")
        return 0 if is_serving else 130
    return 0 if equal else 1


def _fleet_options(options: UpOptions, path: str, name: str) -> FleetOptions:
    arguments = ["--model", path, "--served-name", name, "--engine", options.engine]
    for option, value in asdict(options.transfer).items():
        arguments += [option_of(option), value] if value != "auto" else []
    # Left to itself, vLLM makes bfloat16 of the tiny model's float32.
    arguments += ["--dtype", "float32"] if (options.engine, name) == ("vllm", TINY) else []
    arguments += ["--device", options.device] if options.device != "cpu" else []
    arguments += ["--", *options.arguments] if options.arguments else []
    return FleetOptions(
        num_prefill=options.prefill,
        num_decode=options.decode,
        engine_arguments=tuple(arguments),
        prefill_block_tokens=options.prefill_block_tokens,
        decode_block_tokens=options.decode_block_tokens,
        # How large vLLM's cache is, is for its own options to say.
        cache_tokens=0 if options.engine == "vllm" else options.cache_tokens,
        port=options.port,
        ready_s=_ready_s(options),
    )


def _ready_s(options: UpOptions) -> float:
    """How long the engines may take to start."""
    if options.model != TINY and not Path(options.model).is_dir():
        return DOWNLOAD_READY_S
    return VLLM_READY_S if options.engine == "vllm" else READY_S


def _show_proof(options: UpOptions, fleet: Fleet) -> bool:
    prompt = EXAMPLE if options.once is None else options.once
    temperature, seed = options.temperature, options.seed
    together, by_itself = (Question(fleet.model, prompt, options.max_tokens, salt, temperature, seed) for salt in SALTS)
    show = _silent if options.as_json else _typewriter
    if options.engine == "vllm":
        before = read(fleet.decode_urls)
        answer = ask(fleet.url, together, show)
        answer = replace(answer, report=report_between(before, read(fleet.decode_urls)))
    else:
        answer = ask(fleet.url, together, show)
        engines, transport = (*fleet.decode_urls, *fleet.prefill_urls), answer.report.get("transport", "")
        answer = replace(answer, report=answer.report | {"choice": why_chosen(engines, transport)})
    facts = _facts(answer, ask(fleet.decode_urls[0], by_itself, _silent))
    facts |= {"temperature": temperature, "seed": seed}
    if options.as_json:
        console.data(facts)
    else:
        sys.stdout.write("\n\n")
        Console(markup=False).print(_table(facts))
    return bool(facts["equal"])


def _silent(text: str) -> None:
    return


def _typewriter(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _facts(answer: Answer, alone: Answer) -> dict[str, Any]:
    """One flat record of what happened; the report is what the decode engine measured."""
    report = answer.report
    wire_s = report.get("phases_s", {}).get("wire", 0.0)
    return {
        "equal": answer.token_ids == alone.token_ids and bool(answer.token_ids),
        "text": answer.text,
        "token_ids": list(answer.token_ids),
        "expected_token_ids": list(alone.token_ids),
        "prompt_tokens": answer.prompt_tokens,
        "path": answer.path,
        **report,
        "gigabytes_per_s": report.get("bytes", 0) / wire_s / 1e9 if wire_s else 0.0,
    }


def _table(facts: dict[str, Any]) -> Table:
    table = Table(title="What moved", show_header=False, title_justify="left")
    verdict = "equal, token for token" if facts["equal"] else "DIFFERENT FROM THE ANSWER WITHOUT A TRANSFER"
    received, computed = facts["tokens_received"], facts["tokens_computed"]
    table.add_row("answer", f"{_tokens(len(facts['token_ids']))}: {verdict}")
    table.add_row("prompt", f"{_tokens(facts['prompt_tokens'])}: {received} received, {computed} computed here")
    if reason := _why_nothing(facts):
        table.add_row("nothing moved", reason)
        return table
    table.add_row("bytes moved", f"{facts['bytes']:,} ({facts['bytes'] / 2**20:.2f} MiB)")
    table.add_row("descriptors", f"{facts['descriptors']:,}")
    table.add_row("transport", facts["transport"])
    # Only our own engine says these.
    if "strategy" in facts:
        table.add_row("measured", facts["choice"].replace("; ", "\n"))
        table.add_row("strategy", facts["strategy"])
        table.add_row("verified", VERIFIED[facts["verified"]])
    for phase, seconds in facts["phases_s"].items():
        table.add_row(f"  {phase}", f"{seconds * 1000:.2f} ms")
    remark = " (too few bytes to tell)" if facts["bytes"] < LARGE_BYTES else ""
    table.add_row("rate", f"{facts['gigabytes_per_s']:.3g} GB/s on the wire{remark}")
    return table


def _tokens(number: int) -> str:
    return f"{number} token" if number == 1 else f"{number} tokens"


def _why_nothing(facts: dict[str, Any]) -> str:
    """Why no cache was received; empty when one was."""
    if facts["tokens_received"]:
        return ""
    if facts["recomputed"]:
        return f"the cache did not arrive ({facts['recomputed']}), so the prompt was computed again"
    if facts["path"] == "decode-only":
        return "no prefill engine was available: the decode engine computed the prompt itself"
    return "a prompt of one token is computed by the decode engine"


def _keep_serving(fleet: Fleet) -> None:
    """Until Ctrl-C: mend what breaks."""
    console.say(f"serving an OpenAI API at {fleet.url}/v1 (model {fleet.model}); Ctrl-C or SIGTERM stops everything")
    while True:
        fleet.restart_exited()
        time.sleep(CHECK_S)
