"""kvferry's connector among several: found by its name and in the worker, and never hidden in silence."""

from __future__ import annotations

import importlib
import warnings
from dataclasses import replace
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm.v1", reason="needs vLLM's own environment")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM's and torch's own, at import
    importlib.import_module("vllm.v1.worker.utils")

from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.v1.outputs import KVConnectorOutput

import kvferry.connectors.vllm as connectors
from kvferry.connectors.vllm import extension, features
from kvferry.connectors.vllm.metadata import RankAddress
from kvferry.errors import ConfigurationError

RANK = RankAddress("tcp://127.0.0.1:7001", "epoch")


@pytest.fixture
def ours():
    return object.__new__(connectors.FerryConnector)


def test_whoever_imports_it_can_find_it_by_its_name():
    assert KVConnectorFactory.get_connector_class_by_name("FerryConnector") is connectors.FerryConnector


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_it_is_found_among_the_children_of_others(monkeypatch, ours, depth):
    found = ours
    for _ in range(depth):
        found = SimpleNamespace(sub_connectors=[SimpleNamespace(), found])
    monkeypatch.setattr(extension, "has_kv_transfer_group", lambda: True)
    monkeypatch.setattr(extension, "get_kv_transfer_group", lambda: found)
    assert extension._ours() is ours


def test_it_is_not_found_where_it_is_not(monkeypatch):
    monkeypatch.setattr(extension, "has_kv_transfer_group", lambda: True)
    monkeypatch.setattr(extension, "get_kv_transfer_group", lambda: SimpleNamespace(sub_connectors=[object()]))
    assert extension._ours() is None


def neighbours(role, *names):
    """What vLLM says of a server's connectors, and of ours alone."""
    extra = {"connectors": [{"kv_connector": name, "kv_role": role} for name in names]}
    whole = KVTransferConfig(kv_connector="MultiConnector", kv_role=role, kv_connector_extra_config=extra)
    own = KVTransferConfig(kv_connector="FerryConnector", kv_role=role)
    return [SimpleNamespace(kv_transfer_config=one) for one in (whole, own)]


@pytest.mark.parametrize("role", ["kv_consumer", "kv_both"])
def test_no_other_connector_keeps_what_a_fetch_leaves_unwritten(monkeypatch, role):
    whole, own = neighbours(role, "FerryConnector", "OffloadingConnector")
    monkeypatch.setattr(features, "get_current_vllm_config_or_none", lambda: whole)
    assert features.neighbours(own) == ["OffloadingConnector"]
    with pytest.raises(ConfigurationError, match="OffloadingConnector"):
        features.check_windows(own)


@pytest.mark.parametrize("role", ["kv_consumer", "kv_both"])
def test_what_a_fetch_leaves_unwritten_does_not_wait_for_an_encoder(monkeypatch, role):
    _, own = neighbours(role)
    own.ec_transfer_config = object()
    monkeypatch.setattr(features, "get_current_vllm_config_or_none", lambda: None)
    with pytest.raises(ConfigurationError, match="ec_transfer_config"):
        features.check_windows(own)


def test_ours_does_not_fetch_where_its_server_does_not(monkeypatch):
    whole, _ = neighbours("kv_producer", "FerryConnector", "OffloadingConnector")
    monkeypatch.setattr(features, "get_current_vllm_config_or_none", lambda: whole)
    features.check_role(neighbours("kv_producer")[1])
    with pytest.raises(ConfigurationError, match="kv_both among connectors whose kv_role is kv_producer"):
        features.check_role(neighbours("kv_both")[1])
    monkeypatch.setattr(features, "get_current_vllm_config_or_none", lambda: None)
    features.check_role(neighbours("kv_both")[1])


def test_the_scheduler_hears_that_nothing_is_to_be_read_any_more(ours):
    told = []
    ours._schedulers = [SimpleNamespace(reset=lambda: told.append("reset"))]
    assert ours.reset_cache()
    assert told == ["reset"]


def test_the_scheduler_hears_which_fetches_have_ended(ours):
    told = []
    told_of = SimpleNamespace(sent=lambda ids: told.append(("sent", ids)), unfilled=SimpleNamespace())
    told_of.unfilled.received = lambda ids: told.append(("received", ids))
    ours._schedulers = [told_of]
    ours.update_connector_output(KVConnectorOutput(finished_sending={"a"}, finished_recving={"b"}))
    assert told == [("sent", {"a"}), ("received", {"b"})]


def test_who_fetches_nothing_or_has_no_neighbours_may_have_windows(monkeypatch):
    found = [
        neighbours("kv_producer", "FerryConnector", "OffloadingConnector"),
        neighbours("kv_both", "FerryConnector"),
        [SimpleNamespace(kv_transfer_config=None), neighbours("kv_both")[1]],
        [None, neighbours("kv_both")[1]],
        [neighbours("kv_both")[1]] * 2,
    ]
    for whole, own in found:
        monkeypatch.setattr(features, "get_current_vllm_config_or_none", lambda whole=whole: whole)
        features.check_windows(own)


@pytest.mark.parametrize(
    ("names", "may_tell_early"),
    [
        ((), True),
        (("OffloadingConnector", "NixlConnector"), True),
        (("OffloadingConnector", "LMCacheConnectorV1"), False),
    ],
)
def test_beside_which_connectors_nothing_is_computed_again(monkeypatch, names, may_tell_early):
    whole, own = neighbours("kv_both", "FerryConnector", *names)
    monkeypatch.setattr(features, "get_current_vllm_config_or_none", lambda: whole)
    assert features.LOAD_BEFORE_STEPS.issuperset(features.neighbours(own)) is may_tell_early


@pytest.mark.skipif(
    not hasattr(KVConnectorBase_V1, "bind_kv_cache_manager"), reason="since vLLM 0.30: before, windows are refused"
)
def test_the_scheduler_is_told_how_blocks_leave_the_prefix_cache(ours):
    bound = []
    ours._schedulers = [SimpleNamespace(unfilled=SimpleNamespace(bind=bound.append))]
    manager = SimpleNamespace(evict_blocks=object(), block_pool=None)
    ours.bind_kv_cache_manager(manager)
    assert bound == [manager.evict_blocks]


def test_ranks_of_a_pipeline_are_in_the_order_of_their_stages(ours):
    """As in vLLM's world group, in which they number themselves."""
    told = []
    ours._schedulers = [SimpleNamespace(set_ranks=told.append)]
    ranks = {(pp, tp): replace(RANK, address=f"tcp://127.0.0.1:{7000 + 2 * pp + tp}") for tp in (1, 0) for pp in (1, 0)}
    ours.set_xfer_handshake_metadata_pp_aware(ranks)
    assert [rank.address[-1] for rank in told[0]] == ["0", "1", "2", "3"]


def test_ranks_that_another_connector_hides_end_the_start(ours):
    told = []
    ours._schedulers = [SimpleNamespace(set_ranks=told.append)]
    ours.set_xfer_handshake_metadata_pp_aware({(0, 0): RANK})
    assert told == [(RANK,)]
    with pytest.raises(ConfigurationError, match="another connector hides"):
        ours.set_xfer_handshake_metadata_pp_aware({(0, 0): SimpleNamespace()})
