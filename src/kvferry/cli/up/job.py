"""`kvferry up`: the whole job on one machine, with the proof that it was done right."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from kvferry.cli import console, environment
from kvferry.cli.engine_choice import OTHER_ENGINES
from kvferry.cli.models import MADE_HERE, TINY, resolve
from kvferry.cli.options import option_of
from kvferry.cli.signals import end_as_ctrl_c
from kvferry.cli.up.command import UpOptions
from kvferry.cli.up.engine_report import read, report_between, why_chosen
from kvferry.cli.up.fleet import READY_S, Fleet, FleetOptions
from kvferry.cli.up.machine_share import MEMORY_VARIABLE, VARIABLES, Share, machine_here, shares
from kvferry.errors import ConfigurationError, FerryError
from kvferry.system import os_error_text
from kvferry.testing.output_check import Answer, Question, ask, silent

if TYPE_CHECKING:
    from kvferry.cli.ray.fleet import RayFleet

EXAMPLE = (
    "The ferry leaves the harbour at dawn. On the other side of the river a train is waiting, and whoever wants to "
    "catch it must not lose a single box on the way. The captain counts the boxes, the porter counts them again, and"
)
PROVED = (
    "Proved: the decode engine has computed {tokens_computed} of {prompt_tokens} prompt tokens, received the cache of "
    "the others, and written what it writes without a transfer."
)
CHECK_S = 1.0
LARGE_BYTES = 1 << 20
VERDICTS = {
    True: "equal, token for token",
    False: "DIFFERENT FROM THE ANSWER WITHOUT A TRANSFER",
    None: "not compared: no engine here answers alone",
}
VERIFIED = {
    "sampled": "its lease, and a sample of its bytes",
    "full": "its lease, and every byte",
    "off": "its lease",
    "unreadable": "its lease only: the CPU cannot read its memory",
}
OTHER_READY_S = 900.0
# The first time, a model of the Hub is downloaded by the engines.
DOWNLOAD_READY_S = 3600.0
# A prefix cache would answer the second question from what the first one has moved.
SALTS = ("kvferry-together", "kvferry-alone")


def up(options: UpOptions) -> int:
    """Run it; returns the exit code: 0 when the answers are equal. Raises ConfigurationError, RequestError."""
    end_as_ctrl_c()
    path, name = resolve(options.model)
    logs = _log_folder(options.log_dir)
    told = ""
    try:
        environment.share_api_key()
        with _fleet(options, path, name, logs) as fleet:
            return _run(options, fleet)
    except FerryError as error:
        told = str(error)
        raise
    finally:
        # What the user has chosen stays, whatever it is called, and what an error tells to look into.
        if not options.log_dir and str(logs) not in told:
            shutil.rmtree(logs, ignore_errors=True)


def _log_folder(path: str) -> Path:
    """A new one in the temporary folder, if none is named. Raises ConfigurationError when it cannot be made."""
    try:
        folder = Path(path or tempfile.mkdtemp(prefix="kvferry-"))
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        hint = "--log-dir takes a folder and creates it if needed; without it, TMPDIR is where it is made"
        found = f"{path}: {os_error_text(error)}" if path else os_error_text(error)
        raise ConfigurationError("cannot create the log folder", found=found, expected="a folder", hint=hint) from error
    return folder


def _run(options: UpOptions, fleet: Fleet | RayFleet) -> int:
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


def _fleet(options: UpOptions, path: str, name: str, logs: Path) -> Fleet | RayFleet:
    started = _fleet_options(options, path, name)
    if options.place.on == "here":
        return Fleet(started, logs)
    from kvferry.cli.ray.fleet import RayFleet
    from kvferry.cli.up.ray_settings import settings_of

    settings = settings_of(options, started, _serve_words(options, name))
    return RayFleet(settings, options.port, started.ready_s)


def _serve_words(options: UpOptions, name: str) -> list[str]:
    """What all engines are told, except for which model and which engine they are."""
    words = ["--served-name", name]
    for option, value in asdict(options.transfer).items():
        words += [option_of(option), value] if value != "auto" else []
    # Left to themselves, other engines make bfloat16 of their float32.
    words += ["--dtype", "float32"] if options.engine in OTHER_ENGINES and name in MADE_HERE else []
    return words + (["--device", options.device] if options.device != "cpu" else [])


def _fleet_options(options: UpOptions, path: str, name: str) -> FleetOptions:
    arguments = ["--model", path, "--engine", options.engine, *_serve_words(options, name)]
    return FleetOptions(
        num_prefill=options.prefill,
        num_decode=options.decode,
        engine_arguments=tuple(arguments),
        prefill_block_tokens=options.prefill_block_tokens,
        decode_block_tokens=options.decode_block_tokens,
        # How large another engine's cache is, is for its own options to say.
        cache_tokens=0 if options.engine in OTHER_ENGINES else options.cache_tokens,
        port=options.port,
        ready_s=_ready_s(options),
        has_roles=options.engine == "sglang",
        passed=options.arguments,
        shares=_shares(options),
    )


def _shares(options: UpOptions) -> tuple[Share, ...]:
    """Nothing to share on a cluster, and little by engines of ours on CPUs."""
    is_alone = options.place.on != "here" or (options.engine not in OTHER_ENGINES and options.device not in VARIABLES)
    if is_alone:
        return ()
    variables = environment.all_variables()
    num_engines = options.prefill + options.decode
    return shares(machine_here(variables), options.engine, num_engines, options.arguments, MEMORY_VARIABLE in variables)


def _ready_s(options: UpOptions) -> float:
    """How long the engines may take to start."""
    if options.model not in MADE_HERE and not os.path.isdir(os.path.expanduser(options.model)):
        return DOWNLOAD_READY_S
    return OTHER_READY_S if options.engine in OTHER_ENGINES else READY_S


def _show_proof(options: UpOptions, fleet: Fleet | RayFleet) -> bool:
    prompt = EXAMPLE if options.once is None else options.once
    temperature, seed = options.temperature, options.seed
    together, by_itself = (Question(fleet.model, prompt, options.max_tokens, salt, temperature, seed) for salt in SALTS)
    answer = _with_report(options, fleet, together)
    facts = _facts(answer, _without_transfer(options, fleet, by_itself))
    facts |= {"temperature": temperature, "seed": seed}
    if options.as_json:
        console.data(facts)
    else:
        sys.stdout.write("\n\n")
        Console(markup=False, emoji=False).print(_table(facts))
        if facts["equal"] and facts["tokens_received"]:
            Console(markup=False, emoji=False, highlight=False).print(PROVED.format(**facts))
    return facts["equal"] is not False


def _with_report(options: UpOptions, fleet: Fleet | RayFleet, question: Question) -> Answer:
    """The router's answer, with what can be known of how its cache came."""
    show, keys = silent if options.as_json else _typewriter, environment.api_keys()
    match options.engine:
        case "vllm":
            before = read(fleet.decode_urls)
            answer = ask(fleet.url, question, show, api_keys=keys)
            report = report_between(before, read(fleet.decode_urls))
        case "sglang":
            answer = ask(fleet.url, question, show, api_keys=keys)
            # Its decode computes nothing of a prompt: there would be no answer.
            report = {"tokens_received": answer.prompt_tokens, "tokens_computed": 0}
        case _:
            answer = ask(fleet.url, question, show, api_keys=keys)
            engines, transport = (*fleet.decode_urls, *fleet.prefill_urls), answer.report.get("transport", "")
            report = answer.report | {"choice": why_chosen(engines, transport)}
    return replace(answer, report=report)


def _without_transfer(options: UpOptions, fleet: Fleet | RayFleet, question: Question) -> tuple[int, ...] | None:
    """The tokens of an answer that needs no transfer: the control. None where nobody gives one."""
    if options.engine != "sglang":
        return ask(fleet.decode_urls[0], question, api_keys=environment.api_keys()).token_ids
    if fleet.model != TINY or question.temperature:
        return None
    from kvferry.embedded.model.greedy_answer import greedy_tokens

    return greedy_tokens(resolve(TINY)[0], str(question.prompt), question.max_tokens)


def _typewriter(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _facts(answer: Answer, alone: tuple[int, ...] | None) -> dict[str, Any]:
    """One flat record of what happened; the report is what the decode engine measured. Without a control nobody knows
    whether the answers are equal."""
    report = answer.report
    wire_s = report.get("phases_s", {}).get("wire", 0.0)
    return {
        "equal": None if alone is None and answer.token_ids else answer.token_ids == alone and bool(alone),
        "text": answer.text,
        "token_ids": list(answer.token_ids),
        "expected_token_ids": list(alone or ()),
        "prompt_tokens": answer.prompt_tokens,
        "path": answer.path,
        **report,
        "gigabytes_per_s": report.get("bytes", 0) / wire_s / 1e9 if wire_s else 0.0,
    }


def _table(facts: dict[str, Any]) -> Table:
    table = Table(title="What moved", show_header=False, title_justify="left")
    received, computed = facts["tokens_received"], facts["tokens_computed"]
    table.add_row("answer", f"{_tokens(len(facts['token_ids']))}: {VERDICTS[facts['equal']]}")
    table.add_row("prompt", f"{_tokens(facts['prompt_tokens'])}: {received} received, {computed} computed here")
    if reason := _why_nothing(facts):
        table.add_row("nothing moved", reason)
        return table
    if "bytes" not in facts:
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
    if facts.get("recomputed"):
        return f"the cache did not arrive ({facts['recomputed']}), so the prompt was computed again"
    if facts["path"] == "decode-only":
        return "no prefill engine was available: the decode engine computed the prompt itself"
    return "a prompt of one token is computed by the decode engine"


def _keep_serving(fleet: Fleet | RayFleet) -> None:
    """Until Ctrl-C: mend what breaks."""
    console.say(f"serving an OpenAI API at {fleet.url}/v1 (model {fleet.model}); Ctrl-C or SIGTERM stops everything")
    while True:
        fleet.restart_exited()
        time.sleep(CHECK_S)
