"""Laws of loads, limits and figures."""

import json
import math
import statistics
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.bench.load.answer import MAX_WORDS, Answer, message_of
from kvferry.bench.load.workload import (
    Lengths,
    Piece,
    Prompt,
    Synthetic,
    lengths_named,
    poisson,
    rates_named,
    read_trace,
    synthetic,
)
from kvferry.bench.report.figures import best_of, report_of
from kvferry.bench.report.page import histogram, page
from kvferry.bench.report.record import Record, percentile, summary
from kvferry.bench.report.slo import ItlBy, Slo, slo_named
from kvferry.errors import ConfigurationError

times = st.floats(0, 1e4, allow_nan=False)
seeds = st.integers(0, 2**32)


@st.composite
def records(draw):
    gaps = tuple(draw(st.lists(st.floats(0, 10), max_size=8)))
    ttft = draw(st.floats(0, 10))
    error = draw(st.sampled_from(["", "", "HTTP 500: oh"]))
    return Record(draw(times), draw(times), 10, len(gaps) + 1, ttft, gaps, ttft + sum(gaps), error)


many_records = st.lists(records(), min_size=1, max_size=12)


@given(seeds, st.floats(1e-3, 1e4), st.integers(0, 50))
def test_arrivals_ascend_and_follow_from_the_seed(seed, rate, num):
    arrivals = poisson(num, rate, seed)
    assert len(arrivals) == num
    assert list(arrivals) == sorted(arrivals)
    assert arrivals == poisson(num, rate, seed)
    assert poisson(num, rate * 2, seed) == pytest.approx([at / 2 for at in arrivals])


def test_arrivals_have_the_rate_and_the_spread_of_a_poisson_process():
    arrivals = poisson(20_000, 4.0, 1)
    gaps = np.diff(arrivals)
    assert np.mean(gaps) == pytest.approx(0.25, rel=0.03)
    assert np.std(gaps) == pytest.approx(0.25, rel=0.03)


def test_an_infinite_rate_is_all_at_once():
    assert poisson(3, math.inf, 0) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize("rate", [0.0, -1.0, math.nan])
def test_a_rate_must_be_positive(rate):
    with pytest.raises(ConfigurationError, match="must be positive"):
        poisson(1, rate, 0)


@given(st.lists(times, max_size=30), st.floats(0, 100))
def test_percentiles_are_those_of_numpy(values, part):
    assert percentile(values, part) == pytest.approx(float(np.percentile(values, part)) if values else 0.0)


@given(st.lists(times, min_size=1, max_size=30))
def test_summaries_are_those_of_the_standard_library(values):
    found = summary(values)
    assert found is not None
    assert found.mean == pytest.approx(statistics.fmean(values))
    assert found.median == pytest.approx(statistics.median(values))
    assert found.std == pytest.approx(statistics.pstdev(values), abs=1e-6)
    assert min(values) <= found.median <= found.p99 <= max(values)


@given(many_records, st.sampled_from(list(ItlBy)))
def test_goodput_counts_those_that_meet_every_limit(some, by):
    slo = Slo(ttft_s=2.0, itl_s=1.0, e2el_s=8.0, itl_by=by)
    report = report_of(some, 2.0, 1.0, 1, slo)
    good = [record for record in some if slo.met_by(record)]
    assert report.goodput == len(good) / 2.0
    assert report.attainment == len(good) / len(some)
    assert not any(record.error or record.ttft_s > 2.0 or record.e2el_s > 8.0 for record in good)


@given(many_records, st.floats(0.01, 10), st.floats(0.01, 10))
def test_wider_limits_never_lose_a_request(some, narrow, more):
    wide = Slo(itl_s=narrow + more)
    assert all(wide.met_by(record) for record in some if Slo(itl_s=narrow).met_by(record))


def test_without_limits_every_whole_answer_is_good():
    assert Slo().met_by(Record(0, 0, 1, 1, 1e9, (), 1e9))
    assert not Slo().met_by(Record(0, 0, 1, error="gone"))


def test_the_mean_hides_one_slow_gap_and_the_percentile_does_not():
    record = Record(0, 0, 10, output_tokens=5, ttft_s=0.1, gaps_s=(0.01, 0.01, 0.01, 0.3), e2el_s=0.5)
    assert Slo(itl_s=0.1, itl_by=ItlBy.MEAN).met_by(record)
    assert not Slo(itl_s=0.1, itl_by=ItlBy.P99).met_by(record)


def test_several_tokens_in_a_piece_are_several_tokens():
    assert Record(0, 0, 10, output_tokens=9, ttft_s=1.0, gaps_s=(0.4, 0.4), e2el_s=1.8).tpot_s == pytest.approx(0.1)


def test_limits_are_read_in_any_unit_and_order():
    assert slo_named("itl=100ms, ttft=5s,e2el=1m") == Slo(ttft_s=5.0, itl_s=0.1, e2el_s=60.0)
    assert slo_named("itl=1.5s", ItlBy.P99).itl_by is ItlBy.P99


@pytest.mark.parametrize("text", ["ttft", "ttft=5", "ttft=-1s", "speed=5s", "ttft=1s,ttft=2s", "", "ttft=٣s"])
def test_other_limits_are_refused(text):
    with pytest.raises(ConfigurationError):
        slo_named(text)


@given(st.integers(1, 99), st.integers(0, 99))
def test_lengths_are_a_number_or_a_range(low, more):
    assert lengths_named(f"{low}-{low + more}") == Lengths(low, low + more)
    assert lengths_named(str(low)) == Lengths(low, low)


@pytest.mark.parametrize("text", ["", "0", "5-4", "a", "1-2-3", "-1"])
def test_other_lengths_are_refused(text):
    with pytest.raises(ConfigurationError, match="invalid number of tokens"):
        lengths_named(text)


@given(seeds, st.integers(1, 6), st.integers(1, 40), st.integers(0, 40), st.integers(1, 3))
def test_synthetic_requests_have_the_lengths_and_share_only_the_prefix(seed, num, low, prefix, num_prefixes):
    load = Synthetic(num, Lengths(low, low + 3), Lengths(2, 5), seed, prefix, num_prefixes)
    planned = synthetic(load, tuple(map(float, range(num))))
    assert planned == synthetic(load, tuple(map(float, range(num))))
    prompts = [one.prompt.token_ids() for one in planned]
    for one, ids in zip(planned, prompts, strict=True):
        assert prefix + low <= len(ids) == one.prompt.num_tokens <= prefix + low + 3
        assert 2 <= one.output_tokens <= 5
    assert len({tuple(ids[:prefix]) for ids in prompts}) <= num_prefixes


def test_prompts_as_text_have_a_word_per_token():
    assert len(Prompt((Piece("a", 7), Piece("b", 5))).text().split()) == 12


def lines(*entries):
    return [
        json.dumps(dict(zip(("timestamp", "input_length", "output_length", "hash_ids"), e, strict=False)))
        for e in entries
    ]


def test_a_trace_is_replayed_from_its_first_request_in_order():
    planned = read_trace([*lines((3000, 9, 2), (1000, 8, 1)), "\n"], speed=2.0)
    assert [(one.at_s, one.prompt.num_tokens, one.output_tokens) for one in planned] == [(0.0, 8, 1), (1.0, 9, 2)]


@given(st.integers(1, 3000))
def test_equal_hashes_are_equal_beginnings_and_lengths_are_kept(length):
    first, second = read_trace(lines((0, length, 1, [5, 6, 7]), (1, length + 600, 1, [5, 6, 7, 8])))
    a, b = first.prompt.token_ids(), second.prompt.token_ids()
    assert (len(a), len(b)) == (length, length + 600)
    shared = min(length, 3 * 512)
    assert a[:shared] == b[:shared]


def test_other_hashes_are_other_prompts():
    first, second = read_trace(lines((0, 600, 1, [5, 6]), (1, 600, 1, [9, 6])))
    assert first.prompt.token_ids()[:512] != second.prompt.token_ids()[:512]
    assert first.prompt.token_ids()[512:] == second.prompt.token_ids()[512:]


@pytest.mark.parametrize(
    "line", ["{", "[]", '{"timestamp": 1}', '{"timestamp": 1, "input_length": 0, "output_length": 1}', '"\udcff"']
)
def test_a_bad_line_is_named(line):
    with pytest.raises(ConfigurationError, match="line 2"):
        read_trace([*lines((0, 1, 1)), line])


def test_an_empty_trace_is_refused():
    with pytest.raises(ConfigurationError, match="the trace is empty"):
        read_trace(["", " "])


CHUNK = b'data: {"choices": [{"text": "a"}]}\n\n'
USAGE = b'data: {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 9}}\n\n'
ROLE = b'data: {"choices": [{"delta": {"role": "assistant", "content": ""}}]}\n\n'
CHAT = b'data: {"choices": [{"delta": {"content": "b"}}]}\r\n\r\n'
SPOKEN = b'data: {"choices": [{"delta": {"role": "assistant", "content": "c"}}]}\n\n'
SILENT = b'data: {"choices": [{"text": ""}]}\n\ndata: {"choices": [{"delta": {"content": ""}}], "error": null}\n\n'
# As vLLM and SGLang write them.
LAST = b'data: {"choices": [{"delta": {}, "finish_reason": "length"}]}\n\n'
LAST += b'data: {"choices": [{"delta": {"reasoning_content": null}, "finish_reason": "length"}]}\n\n'
DONE = b"data: [DONE]\n\n"


@given(st.lists(st.integers(0, 200), max_size=12))
def test_how_a_stream_is_cut_changes_nothing_but_times(cuts):
    stream = b": hello\n\n" + ROLE + CHUNK + CHAT + CHUNK + USAGE + DONE
    edges = sorted({0, len(stream), *(cut for cut in cuts if cut < len(stream))})
    answer = Answer()
    for now, (begin, end) in enumerate(pairwise(edges)):
        answer.push(stream[begin:end], now)
    assert (len(answer.piece_times), answer.output_tokens, answer.prompt_tokens) == (3, 9, 3)
    assert answer.wrong == ""


@pytest.mark.parametrize(
    ("stream", "wrong"),
    [
        (CHUNK, "without [DONE]"),
        (DONE, "has no tokens"),
        (ROLE + LAST + DONE, "has no tokens"),
        (CHUNK + b'data: {"error": {"message": "oh dear"}}\n\n', "oh dear"),
        (CHUNK + b"data: nonsense\n\n" + DONE, "not a JSON object"),
    ],
)
def test_answers_that_are_not_whole_are_errors(stream, wrong):
    answer = Answer()
    answer.push(stream, 0.0)
    assert wrong in answer.wrong


def test_tokens_without_text_count_from_the_first_to_the_last():
    """What follows the last line's end is not there on every server."""
    answer = Answer()
    for now, data in enumerate((ROLE, SILENT, CHAT, SILENT, SPOKEN, LAST, USAGE, DONE.rstrip())):
        answer.push(data, now)
    answer.end(9.0)
    assert (answer.piece_times, answer.wrong) == ([1, 1, 2, 3, 3, 4], "")


def run(rate, num_good, num=10):
    good, bad = Record(0, 0, 1, 1, 1.0, (), 1.0), Record(0, 0, 1, 1, 9.0, (), 9.0)
    return report_of([good] * num_good + [bad] * (num - num_good), num / rate, rate, 1, Slo(ttft_s=5.0))


def test_the_best_rate_ends_where_a_lower_one_fails():
    best = best_of([run(8, 10), run(1, 10), run(2, 9), run(4, 5)], 0.9)
    assert (best.highest_rate_within_slo, best.best_goodput_rate) == (2, 8)
    assert best_of([run(1, 1)], 0.9).highest_rate_within_slo == 0.0


def test_rates_are_sorted_and_positive():
    assert rates_named("4,1,2,1") == (1.0, 2.0, 4.0)
    for text in ("", "1,x", "0", "-1", "inf", "nan"):
        with pytest.raises(ConfigurationError):
            rates_named(text)


@given(many_records)
def test_reports_have_the_names_of_vllm_and_are_json(some):
    facts = report_of(some, 1.5, math.inf, 3, Slo()).as_json(with_requests=True)
    names = "request_throughput request_goodput output_throughput total_token_throughput completed duration "
    names += "mean_ttft_ms median_ttft_ms std_ttft_ms p99_ttft_ms mean_tpot_ms mean_itl_ms p99_itl_ms p99_e2el_ms "
    assert facts.keys() >= {*names.split(), "ttfts", "itls", "errors", "num_prompts", "request_rate"}
    assert json.loads(json.dumps(facts, allow_nan=False)) == facts
    assert facts["completed"] + facts["failed"] == len(some)


@given(st.lists(times, max_size=50))
def test_histograms_leave_nothing_out(values):
    chart = histogram("waits", values, "s")
    assert sum(chart.counts) == len(values)
    assert chart.x.top >= max(values, default=0.0)
    assert chart.y.top >= max(chart.counts)


@given(many_records)
def test_pages_need_nothing_else_and_escape_their_title(some):
    reports = [report_of(some, 1.0, rate, 1, Slo(ttft_s=1.0)) for rate in (1.0, 2.0)]
    drawn = page("<script>&", reports)
    assert "<script" not in drawn
    assert "http" not in drawn
    assert drawn.count("<svg") == 7


def test_a_long_error_is_seen_to_go_on():
    assert message_of({"error": {"message": "x" * MAX_WORDS}}) == "x" * MAX_WORDS
    assert message_of({"message": "x" * (MAX_WORDS + 1)}) == "x" * MAX_WORDS + " ..."
