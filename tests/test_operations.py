"""The operators' pages name every metric and every reason that there is, and no others."""

import json
import re
from pathlib import Path

import yaml

from kvferry.http.request_fields import DecodeOnlyReason
from kvferry.router.answers.refusals import FOR_WANT_OF_PREFILL
from kvferry.router.flow.outcomes import OF_THE_REQUEST
from kvferry.wire.messages import Reason

ROOT = Path(__file__).parents[1]
ROUTER = (ROOT / "docs/router.md").read_text()
METRICS = (ROOT / "docs/metrics.md").read_text()
TROUBLES = (ROOT / "docs/troubleshooting.md").read_text()
COUNTER = r'(?:Counter|_counter|CounterMetricFamily)\(\s*f?"([\w{}]+)"'
# Requests that clients write, and what the router's own options or policy leave to decode engines.
AS_WANTED = {*DecodeOnlyReason, "short_prompt", "cached_prompt", "ttft", "policy", "unknown_model", "prefill_refused"}
GAUGE = r'(?:Gauge|_gauge|GaugeMetricFamily|Histogram|_histogram)\(\s*"(\w+)"'


def families():
    """The names of all metrics of the engine and the router, as they are shown."""
    files = (
        "embedded/serving/metrics.py",
        "embedded/transfer/agent_report.py",
        "router/telemetry/metrics.py",
    )
    source = {name: (ROOT / "src/kvferry" / name).read_text() for name in files}
    for name, text in source.items():
        prefix = "kvferry_engine_" if name == "embedded/serving/metrics.py" else ""
        yield from (f"{prefix}{counter}_total" for counter in re.findall(COUNTER, text) if "{" not in counter)
        yield from re.findall(GAUGE, text)


def test_every_metric_is_documented_and_no_other():
    written = set(re.findall(r"^\| `(kvferry_\w+)`", METRICS, re.MULTILINE))
    assert written == set(families())
    assert len(written) == 44


def test_every_reason_of_a_failed_transfer_is_documented_and_no_other():
    (table,) = re.findall(r"^\| reason \| what it means .*?\n\n", TROUBLES, re.MULTILINE | re.DOTALL)
    cells = [line.split("|")[1] for line in table.splitlines()[2:] if line]
    assert {name for cell in cells for name in re.findall(r"`(\w+)`", cell)} == set(Reason)


def rules():
    """The alarms that are suggested."""
    (text,) = re.findall(r"^```yaml\n(groups:.*?)^```$", METRICS, re.MULTILINE | re.DOTALL)
    return yaml.safe_load(text)["groups"][0]["rules"]


def test_every_alarm_asks_for_a_metric_that_exists():
    known = set(families())
    known |= {f"{name}_{part}" for name in known for part in ("bucket", "sum", "count")}
    assert len(rules()) > 5
    for rule in rules():
        assert set(re.findall(r"kvferry_\w+", rule["expr"])) <= known, rule["alert"]
        assert rule["expr"].count("(") == rule["expr"].count(")")


def test_every_reason_that_an_alarm_names_is_one():
    reasons = set(re.findall(r"^\| (`.+?) \|", ROUTER, re.MULTILINE))
    known = {name for cell in reasons for name in re.findall(r"`(\w+)`", cell)} | set(Reason)
    for rule in rules():
        for named in re.findall(r'reason=~?"([^"]+)"', rule["expr"]):
            assert set(named.split("|")) <= known


def reasons_without_prefill():
    """Those of the router's table."""
    table = re.search(r"^\| reason \| why there was no prefill .*?\n\n", ROUTER, re.MULTILINE | re.DOTALL)[0]
    cells = [line.split("|")[1] for line in table.splitlines()[2:] if line]
    return {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}


def test_every_reason_against_a_cache_is_in_the_routers_table():
    assert set(OF_THE_REQUEST) <= reasons_without_prefill()
    assert set(FOR_WANT_OF_PREFILL) <= reasons_without_prefill()


def test_an_alarm_is_told_of_every_request_without_prefill_that_nobody_wanted_so():
    (rule,) = [rule for rule in rules() if rule["alert"] == "WithoutPrefill"]
    alarming = set(re.search(r'reason=~"([^"]+)"', rule["expr"])[1].split("|"))
    assert alarming | AS_WANTED == reasons_without_prefill()
    assert not alarming & AS_WANTED


def expressions():
    """What the dashboard asks Prometheus for, by panel."""
    board = json.loads((ROOT / "docs/grafana/kvferry.json").read_text())
    for panel in board["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"]


def test_the_dashboard_asks_only_for_metrics_that_exist():
    known = set(families())
    known |= {f"{name}_{part}" for name in known for part in ("bucket", "sum", "count")}
    asked = {name for _, expression in expressions() for name in re.findall(r"kvferry_\w+", expression)}
    assert asked <= known
    router = {name for name in families() if name.startswith("kvferry_router_")} - {
        "kvferry_router_refused_registrations_total"
    }
    assert all(any(name in one for one in asked) for name in router)


def test_every_panel_of_the_dashboard_has_a_place_and_a_question():
    board = json.loads((ROOT / "docs/grafana/kvferry.json").read_text())
    places = [tuple(panel["gridPos"][key] for key in "xy") for panel in board["panels"]]
    assert len(set(places)) == len(places)
    assert len({panel["id"] for panel in board["panels"]}) == len(places)
    assert all(expression.count("(") == expression.count(")") for _, expression in expressions())
