"""The suggested alarms, evaluated by Prometheus's own promtool over what the router's real metrics show."""

import json
import re
import shutil
import subprocess
from collections import defaultdict
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from kvferry.router.config import NO_LIMITS, PolicySettings
from kvferry.router.fleet.instance import Origin, ProbeResult
from kvferry.router.fleet.instance_pool import InstancePool
from kvferry.router.policy.balanced import balanced
from kvferry.router.policy.records import Instance, Role
from kvferry.router.telemetry.metrics import Metrics

PAGE = (Path(__file__).parents[2] / "docs/metrics.md").read_text()
SCRAPES, RULES = re.findall(r"^```yaml\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
PROMTOOL = shutil.which("promtool")
needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed: Debian's package prometheus")
EVERY_S, MINUTE, HOUR = 30, 60, 3600
P0, P1 = (Instance(f"http://p{number}:8000", Role.PREFILL) for number in range(2))
D0 = Instance("http://d0:8000", Role.DECODE)


class Fleet:
    """A router's metrics on a clock of its own, as Prometheus scrapes them."""

    def __init__(self, *instances: Instance) -> None:
        self.now, self.metrics = 0, Metrics()
        settings = PolicySettings(balanced, NO_LIMITS, lambda: float(self.now), seed=0)
        self.pool = InstancePool((), self.metrics, settings)
        for instance in instances:
            self.join(instance)
        self.metrics.router_ready.set(1)
        self._scraped = defaultdict(dict)

    def join(self, instance: Instance, result: ProbeResult = ProbeResult.READY) -> None:
        self.pool.add(instance, Origin.FILE)
        self.pool.probed(instance, result, "")

    def run(self, until_s: int, request=lambda: None) -> None:
        """Call `request` each second of this time, each of which is a request that is answered."""
        while self.now < until_s:
            if not self.now % EVERY_S:
                self._scrape()
            request()
            self.metrics.requests.labels("chat", "disaggregated", "200").inc()
            self.now += 1

    def transfer(self, prefill: Instance, reason: str) -> None:
        """A cache to D0 that does not arrive, where the pair may be used now."""
        pair = prefill, D0
        if self.pool.pairs.may_begin(pair, self.pool.now):
            self.pool.lost(pair, reason, self.pool.pairs.begin(pair, self.pool.now))

    def series(self) -> list[dict[str, str]]:
        count = self.now // EVERY_S
        return [
            {"series": name, "values": " ".join(values.get(number, "_") for number in range(count))}
            for name, values in self._scraped.items()
        ]

    def _scrape(self) -> None:
        self.pool.show()
        for family in text_string_to_metric_families(self.metrics.render().decode()):
            for sample in family.samples:
                labels = ",".join(f"{key}={json.dumps(value)}" for key, value in sample.labels.items())
                self._scraped[f"{sample.name}{{{labels}}}"][self.now // EVERY_S] = f"{sample.value:g}"


def promtool(*words) -> None:
    done = subprocess.run([PROMTOOL, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def check_alarms(fleet: Fleet, expected: dict[int, set[str]], folder: Path) -> None:
    """Compare the alarms that fire at these seconds."""
    (folder / "rules.yml").write_text(RULES)
    firing = 'count by (alertname) (ALERTS{alertstate="firing"})'
    asked = [
        {
            "expr": firing,
            "eval_time": f"{second}s",
            "exp_samples": [{"labels": f'{{alertname="{name}"}}', "value": 1} for name in sorted(names)],
        }
        for second, names in expected.items()
    ]
    test = {"interval": f"{EVERY_S}s", "input_series": fleet.series(), "promql_expr_test": asked}
    document = {"rule_files": ["rules.yml"], "evaluation_interval": f"{EVERY_S}s", "tests": [test]}
    (folder / "test.yml").write_text(yaml.safe_dump(document))
    promtool("test", "rules", str(folder / "test.yml"))


@needs_promtool
def test_prometheus_takes_the_rules_and_the_scrapes(tmp_path):
    for name, text, command in (("rules.yml", RULES, "rules"), ("scrapes.yml", SCRAPES, "config")):
        (tmp_path / name).write_text(text)
        promtool("check", command, str(tmp_path / name))


@needs_promtool
def test_nothing_fires_while_all_is_well(tmp_path):
    fleet = Fleet(P0, P1, D0)
    fleet.run(HOUR)
    check_alarms(fleet, {MINUTE: set(), 30 * MINUTE: set(), HOUR - EVERY_S: set()}, tmp_path)


@needs_promtool
def test_a_pair_over_which_no_cache_ever_arrives_is_told_of_until_it_works(tmp_path):
    """It is tried every ten minutes in the end: a rate of lost caches does not show it."""
    fleet = Fleet(P0, P1, D0)
    fleet.run(5 * MINUTE)
    fleet.run(4 * HOUR, lambda: fleet.transfer(P0, "transport"))
    fleet.pool.arrived((P0, D0))
    fleet.run(5 * HOUR)
    broken = {minutes * MINUTE: {"BrokenPair"} for minutes in (11, 30, 60, 120, 200, 239)}
    check_alarms(fleet, {4 * MINUTE: set(), **broken, 4 * HOUR + MINUTE: set(), 5 * HOUR - MINUTE: set()}, tmp_path)


@needs_promtool
def test_of_a_broken_pair_one_of_which_is_down_only_that_one_is_told_of(tmp_path):
    fleet = Fleet(P0, P1, D0)
    fleet.run(MINUTE)
    fleet.run(2 * MINUTE, lambda: fleet.transfer(P0, "peer_lost"))
    fleet.pool.probed(P0, ProbeResult.DOWN, "")
    fleet.run(HOUR)
    check_alarms(fleet, {10 * MINUTE: {"InstanceDown"}, HOUR - MINUTE: {"InstanceDown"}}, tmp_path)


@needs_promtool
@pytest.mark.parametrize("reason", ["wrong_prompt", "unnamed_prompt", "prompt_logprobs"])
def test_prompts_that_are_all_computed_twice_are_told_of(reason, tmp_path):
    """The pair is not to blame for these."""
    fleet = Fleet(P0, D0)
    fleet.run(HOUR, lambda: fleet.pool.count_lost((P0, D0), reason))
    check_alarms(fleet, {11 * MINUTE: {"CachesLost"}, HOUR - MINUTE: {"CachesLost"}}, tmp_path)


@needs_promtool
def test_a_few_caches_that_a_killed_engine_takes_along_are_no_alarm(tmp_path):
    fleet = Fleet(P0, P1, D0)
    fleet.run(10 * MINUTE)
    for _ in range(8):
        fleet.transfer(P0, "peer_lost")
    fleet.pool.remove(P0, Origin.FILE)
    fleet.run(HOUR)
    check_alarms(fleet, {minutes * MINUTE: set() for minutes in range(1, 60)}, tmp_path)


@needs_promtool
def test_the_first_wrong_bytes_are_told_of(tmp_path):
    fleet = Fleet(P0, D0)
    fleet.run(10 * MINUTE)
    fleet.transfer(P0, "digest")
    fleet.run(HOUR)
    found = {10 * MINUTE - EVERY_S: set(), 11 * MINUTE: {"WrongBytes"}, 20 * MINUTE: {"WrongBytes"}}
    check_alarms(fleet, {**found, 30 * MINUTE: set()}, tmp_path)


@needs_promtool
def test_an_engine_that_is_down_is_told_of_until_it_is_back(tmp_path):
    fleet = Fleet(P0, P1, D0)
    fleet.run(10 * MINUTE)
    fleet.pool.probed(P0, ProbeResult.DOWN, "")
    fleet.run(2 * HOUR)
    fleet.pool.probed(P0, ProbeResult.READY, "")
    fleet.run(3 * HOUR)
    down = {second: {"InstanceDown"} for second in range(12 * MINUTE, 2 * HOUR, EVERY_S)}
    check_alarms(fleet, {10 * MINUTE: set(), **down, 2 * HOUR + MINUTE: set(), 3 * HOUR - MINUTE: set()}, tmp_path)


@needs_promtool
def test_an_engine_that_is_starting_is_not_down_before_an_hour_has_passed(tmp_path):
    fleet = Fleet(P0, D0)
    fleet.run(10 * MINUTE)
    fleet.join(P1, ProbeResult.DOWN)
    fleet.run(3 * HOUR)
    check_alarms(fleet, {60 * MINUTE: set(), 80 * MINUTE: {"InstanceDown"}, 170 * MINUTE: {"InstanceDown"}}, tmp_path)
