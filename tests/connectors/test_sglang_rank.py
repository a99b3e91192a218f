"""A rank of SGLang without SGLang: pages that move between real agents, and what is known of them afterwards."""

from __future__ import annotations

import queue
import sys

import msgspec
import pytest
import torch

from kvferry import (
    AgentStopped,
    Fetched,
    FetchFailed,
    FirstToken,
    LeaseEnded,
    Located,
    LocateFailed,
    Prompt,
    Reason,
    RemoteEngine,
    Timing,
    TokenRange,
)
from kvferry.connectors.sglang import rank as module
from kvferry.connectors.sglang.description.describe import RankFacts, describe
from kvferry.connectors.sglang.rank import Rank, Ranks, check_room
from kvferry.connectors.sglang.settings import Settings
from kvferry.connectors.timing import SWITCH_S
from kvferry.devices import cache_device
from kvferry.errors import ConfigurationError, RequestError, TransferError
from kvferry.options import (
    StagingMemory,
    digest_policy_named,
    direction_named,
    may_switch_direction,
    staging_named,
)

DEADLINE_S = 60.0
ROOM, FIRST = 77, FirstToken(17, -0.5, ((17, -0.5), (3, -2.0)))
NUM_LAYERS, NUM_HEADS, HEAD_DIM, NUM_PAGES = 2, 2, 4, 8
PROMPT = Prompt.of(range(100, 118))
SETTINGS = Settings(transport="tcp", staging_bytes=16 << 20, lease_s=4.0)


class MHATokenToKVPool:
    """As SGLang's, with random rows."""

    kv_cache_layout, head_num, start_layer, dtype = "nhd", NUM_HEADS, 0, torch.float32

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        rows = torch.randn(2, NUM_LAYERS, NUM_PAGES * page_size, NUM_HEADS, HEAD_DIM)
        self.k_buffer, self.v_buffer = (list(each) for each in rows.clone())
        self.layer_num = len(self.k_buffer)

    def rows(self, pages: tuple[int, ...], num_tokens: int) -> torch.Tensor:
        """Keys and values of all layers, token by token."""
        slots = [page * self.page_size + slot for page in pages for slot in range(self.page_size)][:num_tokens]
        return torch.stack([buffer[slots] for buffer in (*self.k_buffer, *self.v_buffer)])


class HeardRank(Rank):
    """Notes what the agent has said, once the rank has heard it."""

    def __init__(self, page_size: int, settings: Settings = SETTINGS, ranks: Ranks | None = None, port: int = 0):
        self.notices: queue.Queue = queue.Queue()
        self.pool = MHATokenToKVPool(page_size)
        described = describe(self.pool, RankFacts(0, 1, NUM_HEADS))
        layout, memories = described.layout, described.memories
        device = cache_device(torch.device("cpu"), "cpu", StagingMemory.HOST)
        self.layouts: tuple = ()

        def cache(layouts):
            self.layouts = layouts
            return device.cache(layouts, memories)

        super().__init__(settings, layout, cache, ranks or Ranks(), port)

    def hear(self, notice) -> None:
        super().hear(notice)
        self.notices.put(notice)

    def wait_for(self, kind):
        while not isinstance(notice := self.notices.get(timeout=DEADLINE_S), kind):
            pass
        return notice


@pytest.fixture(autouse=True)
def switch_interval():
    """What a rank sets is set for its whole process, which here is that of other tests too."""
    before = sys.getswitchinterval()
    yield
    sys.setswitchinterval(before)


@pytest.fixture
def new_rank():
    made = []

    def make(*args, **more):
        made.append(HeardRank(*args, **more))
        return made[-1]

    yield make
    for rank in made:
        rank.agent.close()


@pytest.fixture
def prefill(new_rank):
    return new_rank(4)


@pytest.fixture
def decode(new_rank):
    return new_rank(8)


def engine_of(prefill, decode):
    found = decode.engines.find(prefill.agent.address.removeprefix("tcp://"))
    decode.wait_for(Located)
    assert found.engine is not None, found.error
    return found.engine


def computed(prefill, num_tokens=18, pages=(3, 1, 4, 2, 6), room=ROOM):
    leased = prefill.promise(room, PROMPT)
    prefill.grow(room, (pages,), num_tokens, FIRST if num_tokens == 18 else None)
    return leased


class TestBetweenTwo:
    def test_the_pages_of_a_prompt_and_its_first_token(self, prefill, decode):
        leased = computed(prefill)
        fetching = decode.fetch(ROOM, engine_of(prefill, decode), ((5, 2, 7),), TokenRange(0, 18), PROMPT)
        decode.wait_for(Fetched)
        assert (fetching.is_over, fetching.error) == (True, None)
        assert fetching.report.first_token == FIRST
        assert torch.equal(decode.pool.rows((5, 2, 7), 18), prefill.pool.rows((3, 1, 4, 2, 6), 18))
        prefill.wait_for(LeaseEnded)
        assert leased.ended == "done"
        assert (decode._fetches, prefill._leases) == ({}, {})

    def test_only_what_is_asked_for_moves(self, prefill, decode):
        before = decode.pool.rows((5,), 8)
        computed(prefill)
        decode.fetch(ROOM, engine_of(prefill, decode), ((-1, 2, 7),), TokenRange(8, 18), PROMPT)
        decode.wait_for(Fetched)
        assert torch.equal(decode.pool.rows((2, 7), 10), prefill.pool.rows((3, 1, 4, 2, 6), 18)[:, 8:])
        assert torch.equal(decode.pool.rows((5,), 8), before)

    def test_a_decode_that_comes_before_the_prompt_is_computed_waits(self, prefill, decode):
        engine = engine_of(prefill, decode)
        fetching = decode.fetch(ROOM, engine, ((5, 2, 7),), TokenRange(0, 18), PROMPT)
        computed(prefill, 4, (3,))
        prefill.grow(ROOM, ((3, 1, 4, 2, 6),), 18, FIRST)
        decode.wait_for(Fetched)
        assert fetching.report is not None

    def test_another_prompt_gets_nothing(self, prefill, decode):
        computed(prefill)
        other = Prompt.of(range(200, 218))
        fetching = decode.fetch(ROOM, engine_of(prefill, decode), ((5, 2, 7),), TokenRange(0, 18), other)
        decode.wait_for(FetchFailed)
        assert fetching.error.reason == Reason.WRONG_PROMPT
        assert fetching.report is None

    def test_a_room_is_free_again_when_its_request_is_over(self, prefill, decode):
        leased = computed(prefill)
        with pytest.raises(RequestError, match="same bootstrap_room"):
            prefill.promise(ROOM, PROMPT)
        prefill.withdraw(ROOM)
        prefill.wait_for(LeaseEnded)
        assert leased.ended == "withdrawn"
        assert prefill.promise(ROOM, PROMPT).ended == ""

    def test_a_lease_that_is_held_outlives_a_later_one_that_nobody_holds(self, new_rank, decode):
        prefill = new_rank(4, Settings(transport="tcp", staging_bytes=16 << 20, lease_s=4.0))
        engine = engine_of(prefill, decode)
        # They have met: on a busy machine that can take as long as a lease.
        computed(prefill, room=ROOM + 2)
        decode.fetch(ROOM + 2, engine, ((5, 2, 7),), TokenRange(0, 18), PROMPT)
        prefill.wait_for(LeaseEnded)
        leased = computed(prefill)
        decode.hold(ROOM, engine)
        later = computed(prefill, room=ROOM + 1)
        prefill.wait_for(LeaseEnded)
        assert (leased.ended, later.ended) == ("", "expired")

    def test_a_lease_that_is_held_and_not_needed_ends_before_it_expires(self, prefill, decode):
        leased = computed(prefill)
        engine = engine_of(prefill, decode)
        decode.hold(ROOM, engine)
        decode.decline(ROOM, engine)
        prefill.wait_for(LeaseEnded)
        assert leased.ended == "aborted"

    def test_two_fetches_of_one_room_are_two(self, prefill, decode):
        engine = engine_of(prefill, decode)
        first, second = (decode.fetch(ROOM, engine, ((5, 2, 7),), TokenRange(0, 18), PROMPT) for _ in range(2))
        assert first.request_id != second.request_id
        for fetching in (first, second):
            decode.abort(fetching)
            decode.wait_for(module.BlocksReleased)
        assert first.is_over
        assert second.is_over
        assert decode._fetches == {}

    def test_a_lease_that_nobody_reads_expires(self, new_rank):
        prefill = new_rank(4, Settings(transport="tcp", staging_bytes=16 << 20, lease_s=0.5))
        leased = computed(prefill)
        prefill.wait_for(LeaseEnded)
        assert leased.ended == "expired"


class TestWithoutAnAgent:
    def test_nothing_begins_and_everything_ends(self, prefill, decode):
        leased = computed(prefill)
        engine = engine_of(prefill, decode)
        fetching = decode.fetch(ROOM, engine, ((5, 2, 7),), TokenRange(0, 18), Prompt.of(range(18)))
        waiting = decode.engines.find("127.0.0.1:9")
        for each in (prefill, decode):
            each.hear(AgentStopped())
        assert leased.ended == "stopped"
        assert isinstance(fetching.error, TransferError)
        assert fetching.is_over
        with pytest.raises(TransferError, match="has stopped"):
            prefill.promise(ROOM + 1, PROMPT)
        with pytest.raises(TransferError, match="has stopped"):
            decode.fetch(ROOM, engine, ((5, 2, 7),), TokenRange(0, 18), PROMPT)
        # Nobody is left to be told, and the scheduler goes on.
        decode.decline(ROOM, engine)
        later = decode.engines.find("127.0.0.1:10")
        assert isinstance(waiting.error, TransferError)
        assert "has stopped" in str(later.error)

    def test_pages_that_a_source_may_still_write_to_are_not_free(self, decode, monkeypatch):
        fetching = decode._fetches["q"] = module.Fetching("q")
        monkeypatch.setattr(type(decode.agent), "written_ids", frozenset({"q"}))
        decode.hear(AgentStopped())
        assert (fetching.is_over, fetching.error is not None) == (False, True)

    def test_what_has_failed_before_keeps_its_reason(self, decode):
        failed = TransferError(Reason.DIGEST, "the received bytes differ")
        fetching = decode._fetches["q"] = module.Fetching("q", error=failed)
        decode.hear(AgentStopped())
        assert (fetching.is_over, fetching.error) == (True, failed)

    def test_nobody_at_an_address_is_an_error_of_whoever_asks(self, decode, monkeypatch):
        monkeypatch.setattr(type(decode.agent), "locate", lambda agent, *asked: None)
        waiting, error = decode.engines.find("127.0.0.1:9"), TransferError(Reason.DEADLINE, "nobody has answered")
        decode.hear(LocateFailed("tcp://127.0.0.1:9", error))
        assert waiting.error is error

    def test_what_the_agent_refuses_leaves_nothing_behind(self, prefill, monkeypatch):
        def refuse(agent, asked):
            raise RequestError("no")

        engine = RemoteEngine("p0", "epoch-1", (prefill.agent.address,))
        monkeypatch.setattr(type(prefill.agent), "fetch", refuse)
        monkeypatch.setattr(type(prefill.agent), "lease", refuse)
        with pytest.raises(RequestError, match="no"):
            prefill.fetch(ROOM, engine, ((5, 2, 7),), TokenRange(0, 18), PROMPT)
        with pytest.raises(RequestError, match="no"):
            prefill.promise(ROOM, PROMPT)
        assert (prefill._fetches, prefill._leases) == ({}, {})


@pytest.mark.parametrize("room", [None, 0, -1, 1 << 63])
def test_what_cannot_name_a_request_is_refused(room):
    with pytest.raises(RequestError, match=f"cannot name a request; found: {room}; expected: an integer"):
        check_room(room)
    check_room(1)


OTHER_LAYOUT = describe(MHATokenToKVPool(16), RankFacts(0, 1, NUM_HEADS)).layout


class Others(Ranks):
    """The other rank of an engine of two, which is rank 0, answers as well."""

    def gather(self, word):
        introduction = module.Introduction("first", "epoch-0", OTHER_LAYOUT)
        return [msgspec.msgpack.encode(introduction) if word[:4] != b"tcp:" else b"tcp://127.0.0.1:1", word]


@pytest.fixture
def opened(monkeypatch):
    """The configurations of the agents that ranks open; none is opened."""
    opened = []

    def open_agent(config, cache, hear):
        opened.append(config)
        return _Agent()

    monkeypatch.setattr(module, "open_agent", open_agent)
    monkeypatch.setattr(module, "read_token", lambda path: f"the token in {path}")
    return opened


def test_an_engine_has_the_name_and_the_epoch_of_its_rank_0_which_alone_has_the_port(new_rank, opened):
    rank = new_rank(4, Settings(engine_id="ours", token_file="token"), Others((0, 1), 1, 2), 7000)
    new_rank(4, Settings(engine_id="ours", lease_s=7.5), Ranks(), 7000)
    other, alone = opened
    assert [layout.groups[0].block_tokens for layout in rank.layouts] == [16, 4]
    assert rank.agent.addresses == ["tcp://127.0.0.1:1", "tcp://127.0.0.1:7000"]
    assert other.token == "the token in token"
    assert (other.engine_id, other.epoch, other.rank, other.port) == ("first", "epoch-0", 1, 0)
    assert (alone.engine_id, alone.rank, alone.port) == ("ours", 0, 7000)
    assert (alone.timing.lease_s, alone.timing.early_claim_s) == (7.5, module.EARLY_CLAIM_S)
    # Decode does not wait until prefill has answered.
    assert alone.timing.early_claim_s > Timing().early_claim_s


def test_what_is_set_is_what_the_agent_is_opened_with(new_rank, opened):
    new_rank(4, Settings("", "10.0.0.5", "token", "tcp", "push", "full", "pack", 64 << 20))
    (config,) = opened
    assert (config.host, config.transport, config.staging_bytes) == ("10.0.0.5", "tcp", 64 << 20)
    assert (config.digest, config.direction, config.may_switch_direction) == (
        digest_policy_named("full"),
        direction_named("push"),
        may_switch_direction("push"),
    )
    assert config.staging == staging_named("pack", 64 << 20)


def test_whoever_waits_for_news_is_woken_by_them_once(prefill, decode):
    assert not decode.wait_for_news(0.0)
    engine_of(prefill, decode)
    assert decode.wait_for_news(DEADLINE_S)
    assert not decode.wait_for_news(0.0)


def test_an_agent_does_not_wait_long_for_an_interpreter_that_computes(new_rank):
    new_rank(4)
    assert sys.getswitchinterval() == pytest.approx(SWITCH_S)


def test_each_engine_of_a_server_with_data_parallelism_has_a_name_and_a_port_of_its_own(new_rank, opened):
    first, third = (
        new_rank(4, Settings(engine_id="ours"), Ranks(number=number, data_parallel_size=4), 7000) for number in (0, 2)
    )
    assert [(config.engine_id, config.port) for config in opened] == [("ours-0", 7000), ("ours-2", 7002)]
    assert (first.agent.data_parallel_size, third.agent.data_parallel_size) == (4, 4)
    new_rank(4, Settings(engine_id="ours"), Ranks(number=2, data_parallel_size=4), 0)
    assert opened[-1].port == 0


def test_an_engine_whose_port_would_lie_above_the_last_one_is_refused(new_rank, opened):
    with pytest.raises(ConfigurationError, match=r"engine ours-1 cannot listen .*; found: port 65536"):
        new_rank(4, Settings(engine_id="ours"), Ranks(number=1, data_parallel_size=2), 65_535)
    assert opened == []


def test_two_engines_without_a_name_are_two_and_two_starts_of_one_as_well(new_rank, opened, monkeypatch):
    monkeypatch.setattr(module.socket, "gethostname", lambda: "a-name-that-is-long" * 5)
    for engine_id in ("", "", "ours", "ours"):
        new_rank(4, Settings(engine_id=engine_id))
    assert len({config.engine_id for config in opened}) == 3
    assert all(len(config.engine_id) <= module.MAX_ENGINE_ID for config in opened)
    assert len({config.epoch for config in opened}) == 4


def test_ranks_exchange_words_in_their_own_group(monkeypatch):
    def all_gather(words, word, group):
        words[:] = [f"{word.decode()} of {rank} in {group}".encode() for rank in range(len(words))]

    monkeypatch.setattr(module.torch.distributed, "all_gather_object", all_gather)
    assert Ranks((0, 1), 1, 2, "tp").gather(b"word") == [b"word of 0 in tp", b"word of 1 in tp"]
    assert Ranks((1, 3), 1, 4, "world").gather(b"word") == [b"word of 1 in world", b"word of 3 in world"]
    assert Ranks().gather(b"word") == [b"word"]


class _Agent:
    """Stands for one that is opened."""

    address = "tcp://127.0.0.1:7000"

    def start(self, addresses, data_parallel_size):
        self.addresses, self.data_parallel_size = addresses, data_parallel_size

    def close(self):
        """Nothing is open."""
