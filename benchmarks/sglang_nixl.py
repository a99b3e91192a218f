"""Prefill and decode on two real SGLang servers: our backend beside SGLang's own NIXL backend, in one run, on a CPU.

    python benchmarks/sglang_nixl.py > benchmarks/results/sglang_nixl.json   # in the environment of `make test-sglang`

Ours and a peer take turns, request by request. Peers are SGLang's NIXL backend as shipped, and the same with a pause in
NIXL's progress thread (`neutralised/`), which on a machine with few cores is the real peer. Each has a pair of servers
of its own, and those whose turn it is not are stopped by a signal: they take no processor time. A turn begins with a
short request that is not counted. All prompts are computed in one step and sent to both servers at once, as a router
does.
Medians in ms:

* handover: from the end of the prefill's step to the moment in which the request may join a decode step, both as SGLang
  itself takes these times of a request (`sglang_measuring/`), the last rank of either side counts;
* first token: from the request to the first event of the decode server's answer, as a client sees it.

Descriptors and bytes are means per request, of all ranks together: of ours those of its reports, of NIXL those that its
agent was handed. A run in which two variants give different answers to one prompt is refused.
"""

import argparse
import contextlib
import http.client
import json
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from measuring import machine, say

HERE = Path(__file__).parent
TESTS = HERE.parent / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "sglang")]

from sglang_servers import STAND_INS, Pair, PairSpec, SGLangServer, SideSpec  # noqa: E402
from tiny_models import GROUPED, MODELS, VOCAB_SIZE, TinyModel  # noqa: E402

PLUGIN = HERE / "sglang_measuring"
SIZES = (256, 2048, 8000)
CONCURRENCY = (1, 4)
TPS = ((1, 1), (2, 1), (1, 2))
NUM_NEW_TOKENS = 8
ANSWER_S = 300
WARM_TOKENS = 300
# Half a megabyte for 16 tokens: a row per token, layer and half of the heads has 1 KiB, as Llama 3.1 8B's in bfloat16.
WIDE = "llama-8-layers-of-8-heads"
MODELS[WIDE] = TinyModel("Llama", {**GROUPED, "num_hidden_layers": 8, "num_key_value_heads": 8})
FLAGS = (
    *("--chunked-prefill-size", "-1", "--max-prefill-tokens", "16384"),
    *("--max-total-tokens", "33000", "--disaggregation-transfer-backend"),
)


@dataclass(frozen=True)
class Variant:
    """A backend of SGLang, folders that its servers import from first, and variables that they get."""

    backend: str
    path: tuple[str, ...] = ()
    variables: dict[str, str] = field(default_factory=dict)


# Both stay on this host: kvferry reads memory of processes, UCX does the same and talks over loopback.
NIXL = {"UCX_NET_DEVICES": "lo", "UCX_TLS": "all"}
OURS = "kvferry"
VARIANTS = {
    OURS: Variant("kvferry"),
    "NIXL as shipped": Variant("nixl", (), NIXL),
    "NIXL neutralised": Variant("nixl", (str(HERE / "neutralised"),), NIXL),
}
PEERS = tuple(name for name in VARIANTS if name != OURS)


@dataclass(frozen=True)
class Case:
    """Equal prompts in number and length, sent at once to servers of so many ranks."""

    model: str
    tp: tuple[int, int]
    tokens: int
    at_once: int

    def __str__(self) -> str:
        return f"{self.model}, TP {self.tp[0]} to {self.tp[1]}, {self.tokens} tokens, {self.at_once} at once"


@dataclass
class Samples:
    """What one variant did in one case: times in seconds, counts per request."""

    handover: list[float] = field(default_factory=list)
    first_token: list[float] = field(default_factory=list)
    descriptors: list[float] = field(default_factory=list)
    num_bytes: list[float] = field(default_factory=list)
    over: set[str] = field(default_factory=set)
    phases_ms: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    answers: list[tuple[int, ...]] = field(default_factory=list)


class MeasuredServer(SGLangServer):
    """An SGLang server with a variant's backend and with the plug-in that measures it."""

    def __init__(self, mode: str, model: str, spec: SideSpec, log: Path, variant: Variant, folder: Path) -> None:
        super().__init__(mode, model, spec, log)
        self._variant, self._folder = variant, folder

    def environment(self) -> dict[str, str]:
        first = [*self._variant.path, str(self._folder), str(PLUGIN), str(STAND_INS), os.environ.get("PYTHONPATH", "")]
        return {
            **super().environment(),
            "PYTHONPATH": os.pathsep.join(filter(None, first)),
            "MEASURING_FOLDER": str(self._folder),
            "MEASURING_BACKEND": self._variant.backend,
            **self._variant.variables,
        }


class MeasuredPair(Pair):
    """A prefill and a decode server of a variant, and what they write down in `folder`."""

    def __init__(self, spec: PairSpec, variant: Variant, folder: Path) -> None:
        self.spec, self._folder = spec, folder
        install_plugin(folder)
        self.prefill = MeasuredServer("prefill", spec.model, spec.prefill, folder / "prefill.log", variant, folder)
        self.decode = MeasuredServer("decode", spec.model, spec.decode, folder / "decode.log", variant, folder)
        self._read: dict[Path, int] = {}

    def events(self) -> list[dict[str, Any]]:
        """What has been written since this was last asked."""
        found = []
        for path in self._folder.glob("*.jsonl"):
            text = path.read_bytes()
            end = text.rfind(b"\n") + 1
            found += [json.loads(line) for line in text[self._read.get(path, 0) : end].splitlines()]
            self._read[path] = end
        return found


def install_plugin(folder: Path) -> None:
    """What makes SGLang load the plug-in, where `folder` is on PYTHONPATH: a distribution's metadata."""
    metadata = folder / "sglang_measuring-0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang-measuring\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text("[sglang.srt.plugins]\nmeasuring = sglang_measuring:register\n")


@contextlib.contextmanager
def running(model: str, tp: tuple[int, int], name: str) -> Iterator[MeasuredPair]:
    """The two servers of a variant, ready and paused; their logs are kept when something goes wrong."""
    variant = VARIANTS[name]
    sides = [SideSpec(tp=ranks, flags=(*FLAGS, variant.backend)) for ranks in tp]
    folder = Path(tempfile.mkdtemp(prefix="sglang-nixl-"))
    pair = MeasuredPair(PairSpec(model, *sides), variant, folder)
    try:
        pair.start()
        pair.pause()
        yield pair
        shutil.rmtree(folder)
    except BaseException:
        say(f"logs: {folder}")
        raise
    finally:
        pair.stop()


def prompts_of(case: Case, seed: object, number: int) -> list[list[int]]:
    """The same for every variant."""
    dice = random.Random(f"{case.tokens} {case.at_once} {seed}")
    return [[dice.randrange(10, VOCAB_SIZE) for _ in range(case.tokens)] for _ in range(number)]


def post(server: SGLangServer, prompt: list[int], room: int, port: int) -> tuple[float, tuple[int, ...]]:
    """When the first event of a streamed answer came, and the tokens of the last one."""
    body = {
        "input_ids": prompt,
        "sampling_params": {"temperature": 0, "max_new_tokens": NUM_NEW_TOKENS, "ignore_eos": True},
        "stream": True,
        "bootstrap_host": "127.0.0.1",
        "bootstrap_port": port,
        "bootstrap_room": room,
    }
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=ANSWER_S)
    try:
        connection.request("POST", "/generate", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise SystemExit(f"HTTP {response.status} of the {server.name}: {response.read()[:500]!r}")
        return last_event(server, response)
    finally:
        connection.close()


def last_event(server: SGLangServer, response: http.client.HTTPResponse) -> tuple[float, tuple[int, ...]]:
    first_at, answer = 0.0, {}
    while line := response.readline():
        if line.startswith(b"data: {"):
            first_at = first_at or time.perf_counter()
            answer = json.loads(line.removeprefix(b"data: "))
    if "output_ids" not in answer:
        raise SystemExit(f"the {server.name} has not answered: {answer}")
    return first_at, tuple(answer["output_ids"])


def ask(pair: MeasuredPair, prompt: list[int]) -> tuple[int, float, tuple[int, ...]]:
    """The room, the seconds to the first token, and the answer of the decode server."""
    room, port, began = random.getrandbits(62), pair.prefill.bootstrap_port, time.perf_counter()
    with ThreadPoolExecutor(2) as pool:
        prefill = pool.submit(post, pair.prefill, prompt, room, port)
        decode = pool.submit(post, pair.decode, prompt, room, port)
        prefill.result()
        first_at, tokens = decode.result()
    return room, first_at - began, tokens


def measure(pair: MeasuredPair, case: Case, seed: object, into: Samples) -> None:
    """One turn of a case."""
    pair.events()
    with ThreadPoolExecutor(case.at_once) as pool:
        answers = list(pool.map(lambda prompt: ask(pair, prompt), prompts_of(case, seed, case.at_once)))
    events = pair.events()
    moved = [event for event in events if event["what"] == "moved"]
    into.handover += handovers(events, [room for room, _, _ in answers])
    into.first_token += [first_s for _, first_s, _ in answers]
    into.answers += [tokens for _, _, tokens in answers]
    into.descriptors.append(sum(event["descriptors"] for event in moved) / case.at_once)
    into.num_bytes.append(sum(event["bytes"] for event in moved) / case.at_once)
    for event in moved:
        into.over.add(event["over"])
        for phase, took_ms in event["phases_ms"].items():
            into.phases_ms[phase].append(took_ms)


def handovers(events: Iterable[dict[str, Any]], rooms: Sequence[int]) -> list[float]:
    """Seconds of each room from the last rank that has computed it to the last that has it."""
    last: dict[tuple[str, int], float] = {}
    for event in events:
        if event["what"] in ("computed", "ready"):
            key = event["what"], event["room"]
            last[key] = max(last.get(key, 0.0), event["at"])
    return [last["ready", room] - last["computed", room] for room in rooms]


def warm_up(pair: MeasuredPair, case: Case) -> None:
    """What is done at the first request, in the first long step and in the first batch is done."""
    pair.resume()
    for tokens, at_once in ((WARM_TOKENS, 1), (case.tokens, 1), (WARM_TOKENS, case.at_once)):
        measure(pair, Case(case.model, case.tp, tokens, at_once), "warm", Samples())
    pair.pause()


def turn(pair: MeasuredPair, case: Case, repeat: int, into: Samples) -> None:
    pair.resume()
    measure(pair, Case(case.model, case.tp, WARM_TOKENS, 1), (case.tokens, case.at_once, repeat), Samples())
    measure(pair, case, repeat, into)
    pair.pause()


def measure_all(
    model: str, tp: tuple[int, int], peer: str, options: argparse.Namespace
) -> Iterator[tuple[Case, dict[str, Samples]]]:
    """Each case of one model and parallelism, with the samples of ours and of a peer."""
    cases = [Case(model, tp, tokens, at_once) for tokens in options.sizes for at_once in CONCURRENCY]
    names = (OURS, peer)
    with contextlib.ExitStack() as stack:
        pairs = {name: stack.enter_context(running(model, tp, name)) for name in names}
        for pair in pairs.values():
            warm_up(pair, max(cases, key=lambda case: (case.tokens, case.at_once)))
        for case in cases:
            samples = {name: Samples() for name in names}
            for repeat in range(options.repeats if case.at_once == 1 else options.repeats_of_four):
                for name in names if repeat % 2 else reversed(names):
                    turn(pairs[name], case, repeat, samples[name])
            yield case, samples


def check_answers(case: Case, by_variant: dict[str, Samples]) -> None:
    """Raises SystemExit where variants have answered a prompt differently, or all prompts alike."""
    answers = {tuple(samples.answers) for samples in by_variant.values()}
    if len(answers) != 1:
        raise SystemExit(f"variants give different answers: {case}")
    (answered,) = answers
    if len(answered) > 1 and len(set(answered)) == 1:
        raise SystemExit(f"all prompts have the same answer, which says nothing of a cache: {case}")


def row_of(samples: Samples) -> dict[str, Any]:
    """Medians in ms of one variant in one case."""
    return {
        "handover_ms": median_ms(samples.handover),
        "first_token_ms": median_ms(samples.first_token),
        "samples": len(samples.handover),
        "lowest_ms": round(min(samples.handover) * 1000, 1),
        "highest_ms": round(max(samples.handover) * 1000, 1),
        "descriptors": round(statistics.mean(samples.descriptors), 1),
        "megabytes": round(statistics.mean(samples.num_bytes) / 1e6, 2),
        "over": sorted(samples.over),
        "phases_ms": {name: round(statistics.median(values), 2) for name, values in samples.phases_ms.items()},
    }


def median_ms(times_s: Sequence[float]) -> float:
    return round(statistics.median(times_s) * 1000, 1)


def summary(case: Case, peer: str, by_variant: dict[str, Samples]) -> dict[str, Any]:
    """The row of a case: the handover of the peer over ours is above 1 where ours is faster."""
    ours, theirs = row_of(by_variant[OURS]), row_of(by_variant[peer])
    return {
        "model": case.model,
        "tp": f"{case.tp[0]} to {case.tp[1]}",
        "tokens": case.tokens,
        "at_once": case.at_once,
        "peer": peer,
        "load": round(os.getloadavg()[0], 1),
        "ours": ours,
        "theirs": theirs,
        "theirs / ours": round(theirs["handover_ms"] / ours["handover_ms"], 2),
    }


def goals(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What was aimed at, in how many of its cases it was reached, and which ones miss it."""
    long = [row for row in rows if row["tokens"] >= 2048]
    unequal = [row for row in long if len(set(row["tp"].split(" to "))) == 2]
    short = [row for row in rows if row["tokens"] <= 256]
    aims = {
        "never slower from 2,048 tokens on": [(row, row["theirs / ours"] >= 1) for row in long],
        "unequal TP at least 3 times as fast from 2,048 tokens on": [
            (row, row["theirs / ours"] >= 3) for row in unequal
        ],
        "at 256 tokens at most 2 ms slower": [
            (row, row["ours"]["handover_ms"] - row["theirs"]["handover_ms"] <= 2) for row in short
        ],
    }
    return {
        aim: {
            "met": sum(is_met for _, is_met in cases),
            "of": len(cases),
            "missed": [case_of(row) for row, is_met in cases if not is_met],
        }
        for aim, cases in aims.items()
    }


def case_of(row: dict[str, Any]) -> str:
    return f"{row['tp']}, {row['tokens']} tokens, {row['at_once']} at once, {row['peer']}"


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as Markdown: ours / theirs."""
    heads = ("peer", "TP", "tokens", "at once", "handover, ms", "theirs / ours", "first token, ms", "descriptors", "MB")
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for row in rows:
        ours, theirs = row["ours"], row["theirs"]
        cells = [
            *(row["peer"], row["tp"], f"{row['tokens']:,}", str(row["at_once"])),
            f"{ours['handover_ms']:g} / {theirs['handover_ms']:g}",
            f"{row['theirs / ours']:g}",
            f"{ours['first_token_ms']:,.0f} / {theirs['first_token_ms']:,.0f}",
            f"{ours['descriptors']:,.0f} / {theirs['descriptors']:,.0f}",
            f"{ours['megabytes']:,.1f} / {theirs['megabytes']:,.1f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def options_of() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few repeats: about 12 minutes on two cores")
    parser.add_argument("--repeats", type=int, default=7, help="of one request at a time")
    parser.add_argument("--repeats-of-four", type=int, default=3, help="of four requests at once")
    parser.add_argument("--sizes", type=lambda text: tuple(map(int, text.split(","))), default=SIZES)
    parser.add_argument("--tp", default="1:1,2:1,1:2", help="ranks of prefill and decode")
    parser.add_argument("--models", default=WIDE, help="of tests/tiny_models.py, or the wide one")
    parser.add_argument("--peers", default=",".join(PEERS))
    parser.add_argument("--merge", nargs="*", help="measure nothing: results of earlier runs, to be printed as one")
    options = parser.parse_args()
    if options.quick:
        options.repeats, options.repeats_of_four = 2, 1
    return options


def measured(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for model in options.models.split(","):
        for ranks in options.tp.split(","):
            prefill, decode = map(int, ranks.split(":"))
            for peer in options.peers.split(","):
                for case, samples in measure_all(model, (prefill, decode), peer, options):
                    check_answers(case, samples)
                    yield summary(case, peer, samples)


def until_ended(rows: Iterator[dict[str, Any]]) -> list[dict[str, Any]]:
    """All rows, or those that are complete when this process is asked to end."""

    def end(*_: object) -> None:
        raise KeyboardInterrupt

    found = []
    signal.signal(signal.SIGTERM, end)
    try:
        for row in rows:
            found.append(row)
            say(table(found).splitlines()[-1])
    except KeyboardInterrupt:
        say("ended from outside: these are the complete cases")
    return found


def main() -> None:
    options = options_of()
    commands = [f"python benchmarks/sglang_nixl.py {' '.join(sys.argv[1:])}".strip()]
    if options.merge:
        parts = [json.loads(Path(part).read_text()) for part in options.merge]
        commands, rows = ([each for part in parts for each in part[name]] for name in ("commands", "rows"))
    else:
        rows = until_ended(measured(options))
    say(table(rows))
    facts = {
        "commands": commands,
        "machine": machine(),
        "models": "float32, pages of 16 tokens; prompts computed in one step; every process one OpenMP thread",
        "goals": goals(rows),
        "rows": rows,
    }
    print(json.dumps(facts, indent=1))


if __name__ == "__main__":
    main()
