"""`kvferry bench serve` against a server that streams as it is told."""

import asyncio
import contextlib
import json
import threading
from dataclasses import dataclass, field

import pytest
from aiohttp import web
from typer.testing import CliRunner

from kvferry.cli.main import app
from kvferry.errors import ConfigurationError

DEADLINE_S = 30.0


@dataclass
class Fake:
    """Answers after `num_together` requests are there, each with `status`; `seen` are their bodies."""

    status: int = 200
    num_together: int = 1
    is_cut: bool = False
    needs_key: bool = False
    models_status: int = 200
    last: bytes = b"\n\n"
    seen: list[dict] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    enough: asyncio.Event = field(default_factory=asyncio.Event)
    num_open: int = 0
    most_open: int = 0

    async def models(self, request):
        self.keys.append(request.headers.get("authorization"))
        if self.models_status != 200:
            return web.json_response({"error": {"message": "still loading"}}, status=self.models_status)
        if self.needs_key:
            return web.json_response({"error": {"message": "no"}}, status=401)
        return web.json_response({"object": "list", "data": [{"id": "fake"}, {"id": "other"}]})

    async def generate(self, request):
        self.seen.append(body := await request.json())
        self.paths.append(request.path)
        self.keys.append(request.headers.get("authorization"))
        if len(self.seen) >= self.num_together:
            self.enough.set()
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        try:
            async with asyncio.timeout(DEADLINE_S):
                await self.enough.wait()
            return await self.answer(request, body)
        finally:
            self.num_open -= 1

    async def answer(self, request, body):
        if self.status != 200:
            return web.json_response({"error": {"message": "no room"}}, status=self.status)
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        is_chat = "messages" in body
        for _ in range(body["max_tokens"]):
            choice = {"delta": {"content": "x"}} if is_chat else {"text": "x"}
            await response.write(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n")
        usage = {"prompt_tokens": 77, "completion_tokens": body["max_tokens"]}
        await response.write(b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\n")
        if not self.is_cut:
            await response.write(b"data: [DONE]" + self.last)
        return response


@contextlib.contextmanager
def serving(fake):
    """The server in a thread with a loop of its own; its URL."""
    loop, ready, url = asyncio.new_event_loop(), threading.Event(), []

    async def start():
        application = web.Application()
        application.router.add_get("/v1/models", fake.models)
        application.router.add_post("/v1/completions", fake.generate)
        application.router.add_post("/v1/chat/completions", fake.generate)
        runner = web.AppRunner(application)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url.append(f"http://127.0.0.1:{runner.addresses[0][1]}")
        ready.set()
        return runner

    def serve():
        runner = loop.run_until_complete(start())
        loop.run_forever()
        loop.run_until_complete(runner.cleanup())
        loop.close()

    thread = threading.Thread(target=serve)
    thread.start()
    assert ready.wait(DEADLINE_S)
    try:
        yield url[0]
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(DEADLINE_S)


def bench(*arguments, code=0):
    result = CliRunner().invoke(app, ["bench", "serve", *map(str, arguments)])
    assert result.exit_code == code, result.output
    return result


def test_every_request_is_asked_for_and_counted(tmp_path):
    fake = Fake()
    with serving(fake) as url:
        plot = tmp_path / "out.html"
        arguments = ("--requests", 5, "--rate", 1000, "--prompt-tokens", "8-12", "--output-tokens", 3, "--plot", plot)
        facts = json.loads(bench("--url", f"{url}/v1", *arguments, "--slo", "ttft=30s", "--json").stdout)
    assert (facts["completed"], facts["failed"], facts["model_id"]) == (5, 0, "fake")
    assert (facts["total_input_tokens"], facts["total_output_tokens"]) == (5 * 77, 15)
    assert facts["request_goodput"] == facts["request_throughput"] > 0
    assert len(fake.seen) == 6  # one to warm up
    assert all(8 <= len(body["prompt"]) <= 12 and body["ignore_eos"] for body in fake.seen)
    assert "<svg" in plot.read_text()
    assert "within the limits" in plot.read_text()


def test_the_last_line_of_an_answer_need_not_end():
    with serving(Fake(last=b"")) as url:
        facts = json.loads(bench("--url", url, "--requests", 2, "--json").stdout)
    assert (facts["completed"], facts["failed"]) == (2, 0)


def test_without_limits_nothing_is_said_of_goodput(tmp_path):
    plot = tmp_path / "out.html"
    with serving(Fake()) as url:
        facts = json.loads(bench("--url", url, "--requests", 2, "--sweep", "100,200", "--plot", plot, "--json").stdout)
    assert [(run["request_goodput"], run["slo_attainment"]) for run in facts["sweep"]] == [(None, None)] * 2
    text = plot.read_text()
    assert "Throughput over the rate" in text
    for claim in ("within the limits", "met the limits", "oodput", 'class="good"'):
        assert claim not in text


def test_arrivals_never_wait_for_answers():
    # Nobody is answered before all have asked.
    fake = Fake(num_together=20)
    with serving(fake) as url:
        facts = json.loads(bench("--url", url, "--requests", 20, "--warm-up", 0, "--json").stdout)
    assert (facts["completed"], facts["max_concurrent_requests"], fake.most_open) == (20, 20, 20)


def test_with_concurrency_no_more_are_open():
    fake = Fake()
    with serving(fake) as url:
        facts = json.loads(bench("--url", url, "--requests", 9, "--concurrency", 2, "--json").stdout)
    assert facts["completed"] == 9
    assert facts["max_concurrent_requests"] == 2 >= fake.most_open


def test_chat_is_asked_in_words():
    fake = Fake()
    with serving(fake) as url:
        arguments = ("--endpoint", "chat", "--requests", 2, "--prompt-tokens", 6, "--may-stop")
        result = bench("--url", url, *arguments, "--header", "x-who: me", "--slo", "ttft=1s,itl=2s")
    assert fake.paths == ["/v1/chat/completions"] * 3
    assert len(fake.seen[0]["messages"][0]["content"].split()) == 6
    assert "ignore_eos" not in fake.seen[0]
    assert "2 of 2 answered" in result.stdout


@pytest.mark.parametrize(
    ("variable", "option", "shown"),
    [
        ("", (), None),
        ("from-environment", (), "Bearer from-environment"),
        ("from-environment", ("--header", "authorization: Bearer given"), "Bearer given"),
    ],
)
def test_the_api_key_comes_from_the_environment_unless_a_header_has_one(monkeypatch, variable, option, shown):
    monkeypatch.setenv("KVFERRY_API_KEY", variable)
    fake = Fake()
    with serving(fake) as url:
        bench("--url", url, "--requests", 1, "--warm-up", 0, *option)
    assert fake.keys == [shown] * 2


@pytest.mark.parametrize(("variable", "words"), [("", "needs an API key"), ("wrong", "does not take this API key")])
def test_a_server_that_wants_a_key_is_not_said_to_lack_models(monkeypatch, variable, words):
    monkeypatch.setenv("KVFERRY_API_KEY", variable)
    with serving(Fake(needs_key=True)) as url:
        told = bench("--url", url, "--model", "fake", code=2).stderr
    assert words in told
    assert "KVFERRY_API_KEY" in told


@pytest.mark.parametrize(("status", "words"), [(503, "HTTP 503: still loading"), (404, "the server lists no models")])
def test_a_server_that_does_not_list_its_models_needs_to_be_told(status, words):
    with serving(Fake(models_status=status)) as url:
        assert words in " ".join(bench("--url", url, "--requests", 1, code=2).stderr.split())
        bench("--url", url, "--requests", 1, "--model", "fake")


@pytest.mark.parametrize("output", [(), ("--json",)])
def test_figures_are_told_whatever_becomes_of_the_page(tmp_path, monkeypatch, output):
    """They have taken their time."""

    def full(page, text):
        raise ConfigurationError("cannot write the page", found="No space left on device")

    monkeypatch.setattr("kvferry.cli.console.write_page", full)
    with serving(Fake()) as url:
        done = bench("--url", url, "--requests", 2, "--plot", tmp_path / "x.html", *output, code=2)
    assert ('"mean_tpot_ms"' if output else "output tokens/s") in done.stdout
    assert "cannot write the page" in done.stderr


def test_a_sweep_has_a_run_per_rate():
    fake = Fake()
    with serving(fake) as url:
        arguments = ("--sweep", "500,1000", "--requests", 3, "--slo", "ttft=30s,itl=30s")
        facts = json.loads(bench("--url", url, *arguments, "--json", "--every-request").stdout)
        table = bench("--url", url, *arguments).stdout
    assert [run["request_rate"] for run in facts["sweep"]] == [500, 1000]
    assert facts["highest_rate_within_slo"] == 1000
    assert len(facts["sweep"][0]["ttfts"]) == 3
    assert "1000 requests/s" in table
    assert max(map(len, table.splitlines()[:-1])) <= 80
    assert "…" not in table


def test_no_run_finds_the_prompts_of_another_one_cached():
    fake = Fake()
    with serving(fake) as url:
        load = ("--requests", 3, "--prompt-tokens", "20-40", "--prefix-tokens", 8, "--warm-up", 2, "--concurrency", 1)
        bench("--url", url, *load)
        warm_up, run = fake.seen[:2], fake.seen[2:]
        bench("--url", url, *load[:-2], "--sweep", "500,1000")
    runs = [fake.seen[5:7], fake.seen[7:10], fake.seen[10:]]
    lengths = [sorted(len(body["prompt"]) for body in some) for some in (run, *runs)]
    assert lengths[0] == lengths[2] == lengths[3]
    assert [len(body["prompt"]) for body in warm_up] == [len(body["prompt"]) for body in run[:2]]
    for groups in ([warm_up, run], runs):
        beginnings = [{tuple(body["prompt"][:8]) for body in some} for some in groups]
        assert len(set().union(*beginnings)) == len(groups)


def test_a_sweep_without_limits_claims_nothing_about_them():
    with serving(Fake()) as url:
        facts = json.loads(bench("--url", url, "--sweep", "500,1000", "--requests", 3, "--json").stdout)
        table = bench("--url", url, "--sweep", "500,1000", "--requests", 3).stdout
    assert "highest_rate_within_slo" not in facts
    assert "within" not in table
    assert "goodput" not in table


def test_a_trace_is_replayed(tmp_path):
    trace = tmp_path / "trace.jsonl"
    trace.write_text(
        '{"timestamp": 0, "input_length": 4, "output_length": 2, "hash_ids": [1]}\n' * 2, encoding="utf-8-sig"
    )
    fake = Fake()
    with serving(fake) as url:
        facts = json.loads(bench("--url", url, "--trace", trace, "--json").stdout)
    assert facts["completed"] == 2
    assert fake.seen[0]["prompt"] != fake.seen[1]["prompt"] == fake.seen[2]["prompt"]


@pytest.mark.parametrize(("fake", "words"), [(Fake(status=503), "HTTP 503: no room"), (Fake(is_cut=True), "[DONE]")])
def test_failures_are_counted_with_their_words(fake, words):
    with serving(fake) as url:
        facts = json.loads(bench("--url", url, "--requests", 2, "--warm-up", 0, "--json", code=1).stdout)
        warm = bench("--url", url, "--requests", 2, code=2)
    assert (facts["failed"], facts["completed"], facts["slo_attainment"]) == (2, 0, None)
    assert words in facts["common_errors"][0]["error"]
    assert "the warm-up request failed" in warm.stderr


def test_a_time_that_no_answer_has_is_none():
    arguments = ("--requests", 2, "--warm-up", 0)
    with serving(Fake(status=503)) as url:
        facts = json.loads(bench("--url", url, *arguments, "--json", code=1).stdout)
        sweep = bench("--url", url, *arguments, "--sweep", "500,1000", code=1).stdout
        table = bench("--url", url, *arguments, code=1).stdout
    times = {
        name: value for name, value in facts.items() if name.endswith(("_ttft_ms", "_tpot_ms", "_itl_ms", "_e2el_ms"))
    }
    assert len(times) == 4 * 6
    assert set(times.values()) == {None}
    assert facts["p99_late_ms"] is not None
    assert table.split("time to first token")[1].split("inter-token")[0].count("-") == 5
    assert sweep.count("0 of 2") == 2
    assert "0.0" not in sweep


def test_answers_of_one_token_have_no_time_between_tokens():
    with serving(Fake()) as url:
        facts = json.loads(bench("--url", url, "--requests", 2, "--output-tokens", 1, "--json").stdout)
    assert facts["mean_ttft_ms"] > 0
    assert facts["mean_itl_ms"] is facts["p99_tpot_ms"] is None


def test_mistakes_are_told_before_anything_is_asked(tmp_path):
    bad_trace = tmp_path / "bad.jsonl"
    bad_trace.write_text("{}\n")
    fake = Fake()
    with serving(fake) as url:
        for arguments, words in (
            (("--model", "nobody"), "the server does not have this model"),
            (("--slo", "ttft=soon"), "invalid limit in --slo"),
            (("--trace", bad_trace), "line 1 of the trace"),
            (("--trace", tmp_path / "none"), "cannot read the trace"),
            (("--trace", bad_trace, "--rate", 3), "--rate and --trace"),
            (("--sweep", "1,2", "--concurrency", 3), "--concurrency and --sweep"),
            (("--plot", tmp_path / "no" / "x.html"), "the folder does not exist"),
            (("--plot", tmp_path / "x.png"), "a name that ends in .html"),
            (("--header", "nothing"), "invalid --header"),
            (("--sweep", "1,2", "--rate", 3), "--rate and --sweep"),
            (("--trace-speed", 2), "--trace-speed has no effect without --trace"),
            (("--every-request",), "--every-request has no effect without --json"),
            (("--attainment", 0.5), "--attainment has no effect without --sweep"),
            (("--itl-by", "p99"), "--itl-by has no effect without --slo"),
            (("--prefixes", 2), "--prefixes has no effect without --prefix-tokens"),
            (("--slo", "ttft=0s"), "a limit in --slo must be above 0"),
        ):
            assert words in bench("--url", url, *arguments, code=2).stderr
    assert fake.seen == []


def test_a_url_that_is_none_is_said_to_be_none():
    assert "invalid server URL" in bench("--url", "localhost:8000", code=2).stderr


def test_an_answer_that_takes_too_long_names_the_option():
    with serving(Fake(num_together=2)) as url:
        result = bench("--url", url, "--timeout", 0.2, "--requests", 1, "--warm-up", 0, "--json", code=1)
        # The second request lets the server end the first.
        bench("--url", url, "--requests", 1, "--warm-up", 0)
    assert "no complete answer within 0.2 s (--timeout)" in json.loads(result.stdout)["common_errors"][0]["error"]


def test_no_server_is_one_clear_message():
    result = bench("--url", "http://127.0.0.1:9", code=2)
    assert "cannot reach the server" in result.stderr
    assert "cannot connect to 127.0.0.1:9: Connection refused" in result.stderr
    assert "kvferry up" in result.stderr
