"""A manager as SGLang's scheduler makes it: what it opens, what it refuses, which failed pages it keeps."""

from __future__ import annotations

import socket
import warnings
from math import inf
from types import SimpleNamespace

import pytest

from kvferry.connectors.sglang.description.parts import Component
from kvferry.errors import ConfigurationError, LayoutError, RequestError

NUM_HEADS = 4


@pytest.fixture(scope="module")
def sglang():
    """Our classes, which need SGLang's."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from sglang.srt.mem_cache import memory_pool

        from kvferry.connectors.sglang import construction, manager
    return SimpleNamespace(pools=memory_pool, construction=construction, manager=manager)


class Scene:
    """What SGLang hands over: a queue with a pool, options, and the place among the ranks. A test changes what it is
    about, and makes the manager."""

    def __init__(self, sglang, monkeypatch) -> None:
        import torch

        pool = sglang.pools.MHATokenToKVPool(
            size=96,
            page_size=16,
            dtype=torch.float32,
            head_num=NUM_HEADS,
            head_dim=8,
            layer_num=2,
            device="cpu",
            enable_memory_saver=False,
        )
        model = SimpleNamespace(
            get_total_num_kv_heads=lambda: NUM_HEADS,
            get_swa_num_kv_heads=lambda ranks: NUM_HEADS,
            hf_text_config=SimpleNamespace(),
        )
        plain = SimpleNamespace(is_none=lambda: True)
        self.scheduler = SimpleNamespace(model_config=model, spec_algorithm=plain, sliding_window_size=None)
        one_rank = SimpleNamespace(size=lambda: 1)
        self.transfers = SimpleNamespace(
            enable_deferred_kv_release=True, deferred_kv_release_timeout=30.0, gloo_group=one_rank
        )
        self.queue = SimpleNamespace(
            metadata_buffers="rows", scheduler=self.scheduler, token_to_kv_pool=pool, transfer_queue=self.transfers
        )
        self.args = SimpleNamespace(
            kv_data_ptrs=pool.get_contiguous_buf_infos()[0], state_types=[], state_data_ptrs=[], page_size=16
        )
        alone = SimpleNamespace(cpu_group=None)
        self.parallel = SimpleNamespace(
            tp_rank=0,
            tp_size=1,
            pp_rank=0,
            pp_size=1,
            dp_rank=None,
            dp_size=1,
            attn_tp_rank=0,
            attn_tp_size=1,
            attn_dp_rank=0,
            attn_dp_size=1,
            load_balance_method="follow_bootstrap_room",
            world_group=alone,
        )
        self.options = SimpleNamespace(disaggregation_bootstrap_port=0)
        self._sglang, self._managers = sglang, []
        monkeypatch.setattr(sglang.manager, "get_parallel", lambda: self.parallel)
        monkeypatch.setenv("KVFERRY_SGLANG_CONFIG", '{"transport": "tcp", "staging_bytes": 16777216}')

    def manager(self, mode: str):
        def make(queue):
            return self._sglang.manager.FerryManager(self.args, SimpleNamespace(value=mode), self.options, False)

        self._managers.append(self._sglang.construction.note_queue(make, self.queue))
        return self._managers[-1]

    def close(self) -> None:
        for manager in self._managers:
            manager.rank.agent.close()


@pytest.fixture
def scene(sglang, monkeypatch):
    made = Scene(sglang, monkeypatch)
    yield made
    made.close()


@pytest.fixture
def port():
    """A port that nobody has."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        yield held.getsockname()[1]


@pytest.mark.parametrize(("mode", "is_there"), [("prefill", True), ("decode", False)])
def test_only_a_prefill_engine_listens_at_the_bootstrap_port(scene, port, mode, is_there):
    scene.options.disaggregation_bootstrap_port = port
    made = scene.manager(mode)
    assert made.rank.agent.address.endswith(f":{port}") is is_there
    assert (made.metadata, made.kv_args) == ("rows", scene.args)


def test_pages_of_a_failed_request_are_kept_for_as_long_as_it_takes(scene):
    made = scene.manager("decode")
    assert scene.transfers.deferred_kv_release_timeout == inf
    # SGLang frees those of a manager that does not say so at once.
    assert made.enable_deferred_decode_kv_release


def test_a_prefill_engine_frees_its_pages_as_it_always_does(scene):
    del scene.queue.transfer_queue
    scene.manager("prefill")


def test_a_decode_engine_that_frees_failed_pages_at_once_does_not_start(scene):
    scene.transfers.enable_deferred_kv_release = False
    with pytest.raises(ConfigurationError, match="must stay until nothing writes"):
        scene.manager("decode")


@pytest.mark.parametrize("name", ["attn_cp_size", "dcp_size"])
def test_other_ways_to_divide_an_engine_are_refused(scene, name):
    setattr(scene.parallel, name, 2)
    with pytest.raises(ConfigurationError, match=f"{name} 2"):
        scene.manager("prefill")


@pytest.mark.parametrize("is_idle", [True, False])
def test_sglang_is_asked_whether_it_computes_and_not_whether_it_transfers(scene, is_idle):
    def is_fully_idle(for_health_check=False, ignore_waiting=False):
        return is_idle and for_health_check and not ignore_waiting

    scene.scheduler.is_fully_idle = is_fully_idle
    assert scene.manager("decode")._is_idle() is is_idle


@pytest.mark.parametrize("idleness", [{}, {"is_fully_idle": lambda: True}])
def test_an_sglang_that_cannot_be_asked_is_never_idle(scene, idleness):
    vars(scene.scheduler).update(idleness)
    assert not scene.manager("decode")._is_idle()


def test_a_pipeline_is_refused_where_it_decodes(scene):
    scene.parallel.pp_size = 2
    with pytest.raises(ConfigurationError, match="pp_size 2"):
        scene.manager("decode")


def test_speculative_decoding_is_refused(scene):
    scene.scheduler.spec_algorithm = SimpleNamespace(is_none=lambda: False)
    with pytest.raises(ConfigurationError, match="speculative decoding"):
        scene.manager("decode")


@pytest.mark.parametrize("mode", ["prefill", "decode"])
def test_memory_that_goes_and_comes_back_is_refused(scene, mode):
    scene.options.enable_memory_saver = True
    with pytest.raises(ConfigurationError, match="enable-memory-saver"):
        scene.manager(mode)


def test_fetched_windows_are_not_kept_for_other_prompts(scene, monkeypatch):
    """A page that is written in part only would be taken for a whole one."""
    scene.options.disaggregation_decode_enable_radix_cache = True
    scene.manager("decode")
    monkeypatch.setattr(Component, "window_tokens", 8)
    with pytest.raises(ConfigurationError, match="--disaggregation-decode-enable-radix-cache, and layers with windows"):
        scene.manager("decode")
    scene.options.disaggregation_decode_enable_radix_cache = False
    scene.manager("decode")


@pytest.mark.parametrize("name", ["enable_memory_saver", "disaggregation_decode_enable_radix_cache"])
def test_sglang_says_what_is_refused(sglang, name):
    """By the name that the manager looks for."""
    from sglang.srt.server_args import ServerArgs

    assert getattr(ServerArgs(model_path="none", **{name: True}), name) is True
    assert getattr(ServerArgs(model_path="none"), name) is False


def test_states_beside_keys_and_values_are_refused(scene):
    scene.args.state_types, scene.args.state_data_ptrs = [SimpleNamespace(value="mamba")], [[1]]
    with pytest.raises(LayoutError, match="SGLang keeps more of a request"):
        scene.manager("prefill")


def test_a_rank_has_its_own_heads_and_its_own_place_in_its_engine(scene, sglang, monkeypatch):
    """The second of two tensor-parallel ranks, each with all heads that its pool has, in the third of three stages."""
    scene.parallel.tp_rank = scene.parallel.attn_tp_rank = 1
    scene.parallel.tp_size = scene.parallel.attn_tp_size = 2
    scene.parallel.pp_rank, scene.parallel.pp_size = 2, 3
    scene.parallel.world_group.cpu_group = "group"
    del scene.queue.transfer_queue
    scene.scheduler.model_config.get_total_num_kv_heads = lambda: 2 * NUM_HEADS
    seen = []

    def new_rank(settings, layout, cache, ranks, port):
        seen.append((layout, ranks))
        return SimpleNamespace(agent=SimpleNamespace(close=lambda: None), cache_name="cache")

    monkeypatch.setattr(sglang.manager, "Rank", new_rank)
    scene.manager("prefill")
    ((layout, ranks),) = seen
    assert {placement.spans[0].start for placement in layout.placements} == {NUM_HEADS}
    assert (ranks.members, ranks.rank, ranks.num_processes, ranks.group) == (tuple(range(6)), 5, 6, "group")


@pytest.mark.parametrize(
    ("parallel", "expected"),
    [
        ({"dp_size": 3, "dp_rank": 2, "tp_size": 2, "attn_tp_size": 2, "attn_tp_rank": 1}, ((0, 1), 1, 2, 2, 3)),
        # Four ranks are two engines of two ranks: those of the second come after those of the first.
        (
            {"attn_dp_size": 2, "attn_dp_rank": 1, "tp_size": 4, "attn_tp_size": 2, "attn_tp_rank": 1},
            ((2, 3), 1, 4, 1, 2),
        ),
        # Some versions call that data parallelism as well.
        (
            {"dp_size": 2, "attn_dp_size": 2, "attn_dp_rank": 1, "tp_size": 4, "attn_tp_size": 2, "attn_tp_rank": 1},
            ((2, 3), 1, 4, 1, 2),
        ),
        # In two stages each engine has a rank of each.
        (
            {"attn_dp_size": 2, "attn_dp_rank": 1, "tp_size": 2, "attn_tp_size": 1, "pp_size": 2, "pp_rank": 1},
            ((1, 3), 1, 4, 1, 2),
        ),
    ],
)
def test_a_server_with_data_parallelism_is_several_engines(scene, sglang, parallel, expected):
    for name, value in parallel.items():
        setattr(scene.parallel, name, value)
    ranks = sglang.manager._ranks(scene.parallel)
    found = ranks.members, ranks.rank, ranks.num_processes, ranks.number, ranks.data_parallel_size
    assert found == expected


@pytest.mark.parametrize("name", ["dp_size", "attn_dp_size"])
def test_a_prefill_server_must_give_requests_to_its_engines_by_their_rooms(scene, sglang, name):
    setattr(scene.parallel, name, 2)
    scene.parallel.load_balance_method = "round_robin"
    with pytest.raises(ConfigurationError, match="which engine of this server has computed"):
        scene.manager("prefill")
    # Which engine reads is nobody's business.
    sglang.manager._check(scene.queue, is_prefill=False)


def test_memory_of_a_rank_is_moved_on_its_own_device(scene, sglang, monkeypatch):
    """SGLang says `cuda` of every rank's pool."""
    layout, devices = SimpleNamespace(regions=[SimpleNamespace(device=3)]), []
    found = SimpleNamespace(layout=layout, memories=[], components=(), check_complete=lambda args: None)
    monkeypatch.setattr(sglang.manager, "describe", lambda pool, facts: found)
    monkeypatch.setattr(
        sglang.manager,
        "cache_device",
        lambda device, *_: devices.append(str(device)) or SimpleNamespace(milestone="milestone"),
    )
    monkeypatch.setattr(
        sglang.manager,
        "Rank",
        lambda *_: SimpleNamespace(agent=SimpleNamespace(close=lambda: None), cache_name="cache"),
    )
    scene.queue.token_to_kv_pool = SimpleNamespace(device="cuda")
    assert (scene.manager("prefill").milestone, devices) == ("milestone", ["cuda:3"])


def test_staging_memory_that_cannot_be_is_refused(scene, monkeypatch):
    monkeypatch.setenv("KVFERRY_SGLANG_CONFIG", '{"staging_memory": "device"}')
    with pytest.raises(ConfigurationError, match="staging memory can only lie on a device"):
        scene.manager("prefill")


class TestFailedRequests:
    @pytest.fixture
    def made(self, scene):
        return scene.manager("decode")

    def test_a_room_is_safe_once_nothing_writes_to_its_pages(self, made):
        writing = SimpleNamespace(is_over=False)
        made.register(7, writing)
        assert (made.is_abort_release_safe(7, 1), made.is_abort_release_safe(8, 1)) == (False, True)
        writing.is_over = True
        assert made.is_abort_release_safe(7, 1)

    def test_a_room_is_nobody_elses_while_something_may_write_to_its_pages(self, made):
        writing = SimpleNamespace(is_over=False)
        made.register(7, writing)
        with pytest.raises(RequestError, match="same bootstrap_room"):
            made.register(7, SimpleNamespace(is_over=True))
        writing.is_over = True
        made.register(7, SimpleNamespace(is_over=True))

    def test_what_is_forgotten_is_ones_own(self, made):
        first, second = (SimpleNamespace(is_over=True) for _ in range(2))
        made.register(7, first)
        made.register(7, second)
        second.is_over = False
        made.forget(7, first)
        assert not made.is_abort_release_safe(7, 1)
        made.forget(7, second)
        assert made.is_abort_release_safe(7, 1)

    @pytest.mark.parametrize("is_elsewhere", [True, False])
    def test_where_sglang_asks_each_rank_alone_all_of_them_answer_the_same(
        self, scene, sglang, monkeypatch, is_elsewhere
    ):
        monkeypatch.setattr(sglang.manager, "ranks_to_agree", lambda transfers: "ranks")
        monkeypatch.setattr(sglang.manager, "on_all_ranks", lambda is_so, ranks: is_so and is_elsewhere)
        made, writing = scene.manager("decode"), SimpleNamespace(is_over=False)
        made.register(7, writing)
        assert made.is_agreed
        assert not made.is_abort_release_safe(7, 1)
        writing.is_over = True
        assert made.is_abort_release_safe(7, 1) is is_elsewhere

    def test_a_request_that_waits_in_a_room_while_pages_of_the_one_before_are_freed_is_asked_after_later(self, made):
        first, second = (SimpleNamespace(is_over=True) for _ in range(2))
        made.register(7, first)
        made.register(7, second)
        assert made.is_abort_release_safe(7, 1)
        made.clear_deferred_abort_state(7)
        made.forget(7, first)
        second.is_over = False
        assert not made.is_abort_release_safe(7, 1)
        made.forget(7, second)
        assert (made.is_abort_release_safe(7, 1), made._receivers) == (True, {})

    def test_pages_of_a_room_that_is_used_again_are_not_taken_for_those_of_the_request_before(self, made):
        """SGLang frees the pages of the first one later than that is over, and then asks after the second."""
        made.register(7, SimpleNamespace(is_over=True))
        second = SimpleNamespace(is_over=False)
        made.register(7, second)
        made.clear_deferred_abort_state(7)
        assert not made.is_abort_release_safe(7, 1)
        with pytest.raises(RequestError, match="same bootstrap_room"):
            made.register(7, SimpleNamespace(is_over=True))
        second.is_over = True
        assert made.is_abort_release_safe(7, 1)

    @pytest.mark.parametrize("room", [None, -1, 0, 1 << 63])
    def test_a_room_that_sglangs_buffers_cannot_hold_is_refused(self, made, room):
        with pytest.raises(RequestError, match="cannot name a request") as caught:
            made.register(room, SimpleNamespace(is_over=True))
        assert caught.value.found == str(room)

    def test_every_prefill_engine_is_known(self, made):
        info = made.prefill_info_table.get("anybody:1")
        assert (info.dp_size, info.follow_bootstrap_room) == (1, True)
        assert made.try_ensure_parallel_info("anybody:1")
        assert not made.should_verify_kv_checksum("anybody:1")


class TestConstruction:
    def test_what_an_object_is_made_for_is_known_while_it_is_made(self, sglang):
        notes = sglang.construction
        assert notes.note_queue(lambda queue: notes.queue_being_made(), "queue") == "queue"
        assert notes.note_request(lambda queue, request: notes.request_being_made(), "queue", "request") == "request"
        for known in (notes.queue_being_made, notes.request_being_made):
            with pytest.raises(ConfigurationError, match="in another way than kvferry knows"):
                known()

    def test_an_error_leaves_nothing_behind(self, sglang):
        notes = sglang.construction
        for note, arguments in ((notes.note_queue, ("queue",)), (notes.note_request, ("queue", "request"))):
            with pytest.raises(ZeroDivisionError):
                note(lambda *_: 1 // 0, *arguments)
        for known in (notes.queue_being_made, notes.request_being_made):
            with pytest.raises(ConfigurationError):
                known()
