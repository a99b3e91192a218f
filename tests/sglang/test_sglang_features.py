"""What is asked of an SGLang before it is served, and what its ranks agree on where it does not see to that itself."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from kvferry.errors import ConfigurationError


@pytest.fixture(scope="module")
def sglang():
    """The modules of SGLang that are asked."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from sglang.srt.disaggregation import decode
        from sglang.srt.disaggregation.base import conn
        from sglang.srt.disaggregation.fake.conn import FakeKVReceiver

        from kvferry.connectors.sglang import features, plugin
    return SimpleNamespace(conn=conn, decode=decode, receiver=FakeKVReceiver, plugin=plugin, features=features)


def check(sglang) -> None:
    sglang.features.check_calls(sglang.plugin._classes().values())


def test_this_sglang_calls_what_we_know(sglang):
    check(sglang)


def test_one_that_does_not_say_how_many_tokens_it_sends_is_refused(sglang, monkeypatch):
    monkeypatch.setattr(sglang.conn.BaseKVSender, "send", lambda self, kv_indices: None)
    with pytest.raises(AttributeError, match="no parameter num_kv_tokens"):
        check(sglang)


def test_one_that_frees_pages_which_other_ranks_may_write_to_is_refused(sglang, monkeypatch):
    monkeypatch.delattr(sglang.receiver, "ensure_abort_notified")
    with pytest.raises(AttributeError, match="ensure_abort_notified"):
        check(sglang)


def test_one_that_says_more_than_we_know_is_refused(sglang, monkeypatch):
    monkeypatch.setattr(sglang.conn.BaseKVReceiver, "init", lambda self, prefill_dp_rank, planet: None)
    with pytest.raises(TypeError, match="parameters that are not known: planet"):
        check(sglang)


def test_one_that_calls_more_than_we_know_is_refused(sglang):
    class More(sglang.plugin._classes()["sender"]):
        @abstractmethod
        def sing(self) -> None: ...

    with pytest.raises(TypeError, match="FerrySender has methods that are not known: sing"):
        sglang.features.check_calls([More])


def test_users_are_told_which_sglang_fits(sglang, monkeypatch):
    monkeypatch.delattr(sglang.receiver, "ensure_abort_notified")
    with pytest.raises(ConfigurationError, match=r"does not fit this SGLang.*expected: SGLang 0\.5\.21 to 0\.5\.23"):
        sglang.plugin.register()


@pytest.mark.parametrize(
    ("has_its_own_way", "num_ranks", "is_ours"), [(True, 2, False), (False, 1, False), (False, 2, True)]
)
def test_ranks_agree_through_us_where_sglang_has_no_way(sglang, monkeypatch, has_its_own_way, num_ranks, is_ours):
    monkeypatch.delattr(sglang.decode, "all_reduce_flags", raising=False)
    if has_its_own_way:
        monkeypatch.setattr(sglang.decode, "all_reduce_flags", None, raising=False)
    group = SimpleNamespace(size=lambda: num_ranks)
    assert sglang.features.ranks_to_agree(SimpleNamespace(gloo_group=group)) is (group if is_ours else None)


@pytest.mark.parametrize(("said", "agreed"), [((True, True), True), ((True, False), False), ((False, False), False)])
def test_what_is_so_on_all_ranks_is_so(sglang, said, agreed):
    import torch.distributed as dist

    store = dist.HashStore()

    def ask(rank: int) -> bool:
        return sglang.features.on_all_ranks(said[rank], dist.ProcessGroupGloo(store, rank, len(said)))

    with ThreadPoolExecutor(len(said)) as ranks:
        assert list(ranks.map(ask, range(len(said)))) == [agreed] * len(said)
