"""What users may say in vLLM's transfer configuration, and what the figures look like in vLLM's own interfaces."""

import importlib
import logging
import warnings
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm.v1", reason="needs vLLM's own environment")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM's and torch's own, at import
    importlib.import_module("vllm.v1.worker.utils")

import msgspec
import vllm
from prometheus_client import Counter, Gauge, Histogram
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

from kvferry.connectors.vllm import settings as vllm_settings
from kvferry.connectors.vllm.connector import FerryConnector
from kvferry.connectors.vllm.features import check_version
from kvferry.connectors.vllm.settings import settings_of
from kvferry.connectors.vllm.stats import FerryPromMetrics, FerryStats
from kvferry.connectors.vllm_middleware.worker_reports import FetchOutcome, FetchOutcomes
from kvferry.errors import ConfigurationError
from kvferry.plan.programs.copies import Direction
from kvferry.session.commands import FetchReport

PORT = "VLLM_NIXL_SIDE_CHANNEL_PORT"
HOST = "VLLM_NIXL_SIDE_CHANNEL_HOST"
REPORT = FetchReport(39, 4 << 20, 3, "tcp", "tcp 1 GB/s", "direct", {"claim": 0.01, "wire": 0.1})


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    for name in (PORT, HOST):
        monkeypatch.delenv(name, raising=False)


NO_KIND = {"enable_sleep_mode": False, "is_encoder_decoder": False, "runner_type": "generate"}


def settings(extra=None, ranks=1, index=0, ubatching=False, speculative=None, routed=False, elastic=False, **model):
    transfer = KVTransferConfig(
        kv_connector="FerryConnector", kv_role="kv_both", engine_id="ours", kv_connector_extra_config=extra or {}
    )
    parallel = SimpleNamespace(world_size=ranks, data_parallel_index=index, use_ubatching=ubatching)
    parallel.enable_elastic_ep = elastic
    config = SimpleNamespace(kv_transfer_config=transfer, parallel_config=parallel, speculative_config=speculative)
    config.aux_output_config = SimpleNamespace(enable_return_routed_experts=routed)
    config.model_config = SimpleNamespace(**NO_KIND | model)
    return settings_of(config)


def test_what_is_computed_only_with_the_prompt_cannot_be_returned():
    with pytest.raises(ConfigurationError, match="routed experts"):
        settings(routed=True)


@pytest.mark.parametrize(
    ("kind", "found"), [({"runner_type": "pooling"}, "--runner pooling"), ({"elastic": True}, "--enable-elastic-ep")]
)
def test_engines_that_nobody_could_fetch_from_are_refused(kind, found):
    with pytest.raises(ConfigurationError, match=f"found: {found}.*hint:"):
        settings(**kind)


def test_a_speculators_layers_are_transferred_unless_told_otherwise():
    assert settings().draft_layers
    assert not settings({"transfer_draft_layers": False}).draft_layers
    assert settings({"transfer_draft_layers": "if_both"}).draft_layers == "if_both"


def test_an_engine_that_sleeps_without_a_word_is_refused(monkeypatch):
    monkeypatch.setattr(vllm_settings, "SAYS_WHEN_IT_SLEEPS", False)
    with pytest.raises(ConfigurationError, match="--enable-sleep-mode"):
        settings(enable_sleep_mode=True)
    monkeypatch.setattr(vllm_settings, "SAYS_WHEN_IT_SLEEPS", True)
    assert settings(enable_sleep_mode=True)
    # Of vLLM 0.33 and later, which asks before it makes a connector.
    assert FerryConnector.supports_sleep_mode(None)


def test_a_model_with_an_encoder_is_refused():
    with pytest.raises(ConfigurationError, match="found: an encoder-decoder model"):
        settings(is_encoder_decoder=True)


def test_nothing_need_be_said():
    found = settings().agent
    assert (found.engine_id, found.port, found.transport, found.timing.lease_s) == ("ours", 0, "auto", 30.0)


def test_layers_may_leave_one_by_one_where_each_runs_once_per_step():
    assert not settings(ubatching=True, speculative=object()).layer_wise
    assert settings({"layer_wise": True}).layer_wise
    for several in ({"ubatching": True}, {"speculative": object()}):
        with pytest.raises(ConfigurationError, match="more than once per step"):
            settings({"layer_wise": True}, **several)
    assert [FerryConnector.requires_piecewise_for_cudagraph({"layer_wise": is_so}) for is_so in (True, False)] == [
        True,
        False,
    ]


def test_what_is_said_counts():
    found = settings({"host": "127.0.0.1", "port": 7000, "transport": "tcp", "kv_lease_duration": 5}).agent
    assert (found.host, found.port, found.transport, found.timing.lease_s) == ("127.0.0.1", 7000, "tcp", 5.0)


@pytest.mark.parametrize(
    ("extra", "direction", "may_switch_direction"),
    [
        ({}, Direction.READ, True),
        ({"transfer_direction": "auto"}, Direction.READ, True),
        ({"transfer_direction": "pull"}, Direction.READ, False),
        ({"transfer_direction": "push"}, Direction.WRITE, False),
    ],
)
def test_who_moves_a_cache(extra, direction, may_switch_direction):
    found = settings(extra).agent
    assert (found.direction, found.may_switch_direction) == (direction, may_switch_direction)


def test_where_staging_memory_lies():
    assert settings().staging_memory == "host"
    assert settings({"staging_memory": "device"}).staging_memory == "device"


def test_slots_are_made_for_the_staging_memory_that_there_is():
    found = settings().agent
    assert (found.staging_bytes, found.staging.slot_bytes) == (384 << 20, 24 << 20)
    found = settings({"staging_bytes": 64 << 20, "strategy": "pack"}).agent
    assert found.staging_bytes == 64 << 20
    assert 8 * found.staging.slot_bytes == 32 << 20


def test_the_token_is_named_by_its_file(tmp_path):
    assert not settings().agent.token
    file = tmp_path / "token"
    file.write_text("0123456789abcdef" * 4)
    file.chmod(0o600)
    assert settings({"token_file": str(file)}).agent.token


def test_the_stock_connectors_variables_are_fallbacks(monkeypatch):
    monkeypatch.setenv(PORT, "5600")
    monkeypatch.setenv(HOST, "127.0.0.1")
    assert (settings().agent.host, settings().agent.port) == ("127.0.0.1", 5600)
    assert settings({"port": 7000}).agent.port == 7000


def test_ranks_of_several_engines_have_ports_of_their_own():
    assert [settings({"port": 7000}, ranks=2, index=index).agent.port for index in range(3)] == [7000, 7002, 7004]
    assert settings(ranks=2, index=1).agent.port == 0


def test_the_stock_connectors_keys_are_accepted(monkeypatch, caplog):
    monkeypatch.setattr(logging.getLogger("kvferry"), "propagate", True)
    caplog.set_level(logging.INFO, "kvferry")
    settings({"backends": ["UCX"], "num_threads": 4, "enforce_handshake_compat": False})
    # Twice each where a connector of an earlier test has made our loggers speak through vLLM's handlers as well.
    told = {record.getMessage() for record in caplog.records if record.name == vllm_settings.__name__}
    ignored = ("enforce_handshake_compat", "num_threads")
    assert told == {f"kvferry ignores {key}: it has no effect here" for key in ignored}


@pytest.mark.parametrize(
    ("extra", "word"),
    [
        ({"kv_lease_duration": 0}, "kv_lease_duration"),
        ({"kv_lease_duration": "30"}, "kv_lease_duration"),
        ({"kv_lease_duration": True}, "kv_lease_duration"),
        ({"layer_wise": "yes"}, "layer_wise"),
        ({"port": -1}, "port"),
        ({"port": 1 << 16}, "port"),
        ({"port": "7000"}, "port"),
        ({"backends": ["GDS"]}, "GDS"),
        ({"token_file": 7}, "token_file"),
        ({"transprot": "tcp"}, "transprot"),
        ({"staging_memory": "vram"}, "staging memory"),
        ({"staging_bytes": "256 MiB"}, "staging_bytes"),
        ({"staging_bytes": True}, "staging_bytes"),
        ({"staging_bytes": (1 << 20) - 1}, "staging memory"),
        ({"transfer_direction": "sideways"}, "direction"),
    ],
)
def test_what_is_wrong_is_named(extra, word):
    with pytest.raises(ConfigurationError, match=word):
        settings(extra)


@pytest.mark.parametrize("version", ["0.28.4", "0.34.0", "1.0", "nonsense"])
def test_other_versions_of_vllm_are_refused(monkeypatch, version):
    monkeypatch.setattr(vllm, "__version__", version)
    with pytest.raises(ConfigurationError, match="not supported"):
        check_version()


def test_every_build_of_a_supported_version_is_fine(monkeypatch):
    for version in ("0.29.0", "0.31.1", "0.32.0", "0.32.1+cpu", "0.32.0.dev5+g1234", "0.33.0"):
        monkeypatch.setattr(vllm, "__version__", version)
        check_version()


def test_a_version_that_lacks_something_is_refused_with_its_name(monkeypatch):
    monkeypatch.delattr(KVConnectorBase_V1, "on_new_request")
    with pytest.raises(ConfigurationError, match="it has no KVConnectorBase_V1"):
        check_version()


def test_figures_of_all_ranks_add_up():
    one, other = FerryStats(), FerryStats()
    one.fetched("a", REPORT, "prefill")
    other.fetched("b", REPORT, "prefill")
    other.freed("expired")
    other.freed("done")
    both = one.aggregate(other).aggregate(FerryStats())
    assert both.reduce()["Num successful transfers"] == 2
    assert len(both.data["num_kv_expired_reqs"]) == 1
    assert both.data["phases"] == [["claim", "prefill", "tcp", 0.01], ["wire", "prefill", "tcp", 0.1]] * 2


def test_figures_survive_the_way_to_the_front_end():
    stats = FerryStats()
    stats.fetched("a", REPORT, "prefill")
    assert FerryStats(data=stats.data).reduce() == stats.reduce()


class Silent:
    """Every kind of metric; its values do not matter."""

    def __init__(self, **facts):
        self.observe = self.inc = lambda value=1: None

    def labels(self, *values, **named):
        return self


def test_the_front_end_hears_how_each_cache_came(monkeypatch):
    """Over two ranks and the encoding that vLLM sends them in."""
    outcomes = FetchOutcomes()
    monkeypatch.setattr("kvferry.connectors.vllm.stats.FETCH_OUTCOMES", outcomes)
    one, other = FerryStats(), FerryStats()
    one.fetched("cmpl-a-0-12345678", REPORT, "prefill")
    one.fetched("cmpl-b-0-12345678", REPORT, "prefill")
    other.failed("cmpl-a-0-12345678", FetchOutcome("peer_lost", "it is gone", True))
    told = msgspec.msgpack.decode(msgspec.msgpack.encode(one.aggregate(other).data))
    outcomes.expect("cmpl-a-0")
    outcomes.expect("cmpl-b-0")
    config = SimpleNamespace(kv_transfer_config=None)
    kinds = dict.fromkeys((Gauge, Counter, Histogram), Silent)
    FerryPromMetrics(config, kinds, ["engine"], {0: ["0"]}).observe(told)
    assert outcomes.known("cmpl-a-0") == FetchOutcome("peer_lost", "it is gone", True, REPORT.phases_s)
    assert outcomes.known("cmpl-b-0") == FetchOutcome(phases_s=REPORT.phases_s)


def test_failures_alone_are_reported():
    stats = FerryStats()
    assert stats.is_empty()
    stats.failed("a", FetchOutcome("peer_lost", "it is gone"))
    assert not stats.is_empty()
    assert len(stats.data["num_failed_transfers"]) == 1
