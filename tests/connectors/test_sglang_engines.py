"""Who is at a prefill engine's address, as a decode of SGLang asks it: once, and never waiting."""

from __future__ import annotations

import queue
import threading

import pytest

from kvferry import Located, LocateFailed, Reason, RemoteEngine
from kvferry.connectors.sglang import prefill_engines as module
from kvferry.connectors.sglang.prefill_engines import PrefillEngines
from kvferry.errors import RequestError, TransferError

DEADLINE_S, SLOW_S = 30.0, 10.0
PLACE, ADDRESS = "127.0.0.1:8998", "tcp://127.0.0.1:8998"
ENGINE = RemoteEngine("p0", "epoch-1", (ADDRESS,))
GONE = TransferError(Reason.ABORTED, "the agent has stopped")


@pytest.fixture
def asked():
    """The addresses that the agent is asked for, as they come."""
    return queue.Queue()


@pytest.fixture
def engines(asked):
    made = PrefillEngines(lambda address, number: asked.put(address if number == 0 else (address, number)))
    yield made
    made._resolver.shutdown()


def test_it_is_asked_once_and_everybody_hears_the_answer(engines, asked):
    first, again = engines.find(PLACE), engines.find(PLACE)
    assert (asked.get(timeout=DEADLINE_S), first.engine) == (ADDRESS, None)
    engines.heard(Located(ADDRESS, ENGINE))
    assert (first.engine, again.engine, asked.empty()) == (ENGINE, ENGINE, True)
    assert engines.find(PLACE).engine == ENGINE


def test_who_wants_to_hear_is_told_once_and_at_once_where_it_is_known(engines, asked):
    told = []
    lookup = engines.find(PLACE)
    engines.tell(lookup, told.append)
    assert told == []
    for _ in range(2):
        engines.heard(Located(ADDRESS, ENGINE))
        assert told == [ENGINE]
    engines.tell(lookup, told.append)
    assert told == [ENGINE, ENGINE]


def test_who_wants_to_hear_of_a_place_where_nobody_is_hears_nothing(engines, asked):
    engines.tell(engines.find(PLACE), pytest.fail)
    engines.heard(LocateFailed(ADDRESS, GONE))


def test_after_an_error_and_when_it_is_forgotten_it_is_asked_again(engines, asked):
    failed = engines.find(PLACE)
    asked.get(timeout=DEADLINE_S)
    engines.heard(LocateFailed(ADDRESS, GONE))
    assert failed.error is GONE
    again = engines.find(PLACE)
    assert (asked.get(timeout=DEADLINE_S), again is failed) == (ADDRESS, False)
    engines.heard(Located(ADDRESS, ENGINE))
    # The older request has had its answer.
    assert (failed.engine, again.engine) == (None, ENGINE)
    engines.forget(PLACE)
    assert engines.find(PLACE).engine is None
    assert asked.get(timeout=DEADLINE_S) == ADDRESS


@pytest.fixture
def slow_names(monkeypatch):
    """The names that are looked up, each for as long as `let_go` is not set."""
    names, let_go = queue.Queue(), threading.Event()

    def address_of(place):
        if place != PLACE:
            names.put(place)
            assert let_go.wait(SLOW_S)
        return ADDRESS

    monkeypatch.setattr(module, "_address_of", address_of)
    yield names, let_go
    let_go.set()


def test_a_name_that_takes_long_to_look_up_keeps_nobody_waiting(engines, asked, slow_names):
    names, let_go = slow_names
    waiting = [engines.find("prefill-0:8998", room) for room in range(2 * module.NAME_THREADS)]
    assert names.get(timeout=DEADLINE_S) == "prefill-0:8998"
    # Another place is found meanwhile, by its address and by its name.
    engines.find(PLACE)
    assert asked.get(timeout=DEADLINE_S) == ADDRESS
    engines.find("prefill-1:8998")
    assert names.get(timeout=DEADLINE_S) == "prefill-1:8998"
    let_go.set()
    # The name was looked up once, for everybody.
    found = {asked.get(timeout=DEADLINE_S) for _ in range(len(waiting) + 1)}
    assert (found, names.empty()) == ({ADDRESS, *((ADDRESS, room) for room in range(1, len(waiting)))}, True)


def test_only_so_many_names_are_looked_up_at_a_time(engines, asked, slow_names, monkeypatch):
    monkeypatch.setattr(module, "MAX_NAMES", 2)
    waiting = [engines.find(f"prefill-{number}:8998") for number in (0, 1)]
    assert engines.find("prefill-2:8998").error.reason == Reason.UNREACHABLE
    # An address is no name.
    engines.find(PLACE)
    assert asked.get(timeout=DEADLINE_S) == ADDRESS
    assert [lookup.error for lookup in (*waiting, engines.find("prefill-1:8998", 5))] == [None] * 3


def test_what_the_agent_refuses_is_the_error_of_all_that_asked_for_it(engines, monkeypatch):
    def refuse(address, number):
        raise RequestError("another host", found=address)

    monkeypatch.setattr(engines, "_locate", refuse)
    assert engines.find(PLACE).error.found == ADDRESS
    assert engines._asked == engines._resolving == {}


def test_an_agent_that_stops_leaves_no_name_to_wait_for(engines, asked, slow_names):
    waiting = engines.find("prefill-0:8998")
    engines.stop(GONE)
    assert (waiting.error, engines.find("prefill-1:8998").error) == (GONE, GONE)
    _, let_go = slow_names
    let_go.set()
    engines._resolver.shutdown()
    assert asked.empty()


def test_an_answer_is_everybodys_who_has_asked_for_its_address_and_may_come_twice(engines, asked):
    earlier = engines.find(PLACE)
    engines.forget(PLACE)
    later = engines.find(PLACE)
    for _ in range(2):
        engines.heard(Located(ADDRESS, ENGINE))
    assert (earlier.engine, later.engine) == (ENGINE, ENGINE)
    for _ in range(2):
        engines.forget(PLACE)


def test_an_agent_is_asked_for_addresses_only(engines, asked):
    engines.find("localhost:8998")
    assert asked.get(timeout=DEADLINE_S) in (ADDRESS, "tcp://[::1]:8998")


def test_an_ipv6_address_stands_in_brackets(engines, asked):
    engines.find("[::1]:8998")
    assert asked.get(timeout=DEADLINE_S) == "tcp://[::1]:8998"


@pytest.mark.parametrize("place", ["127.0.0.1:ninety", "no port", "127.0.0.1:99999999999999999999", "a b:1"])
def test_what_is_no_address_is_an_error_of_its_request(engines, asked, place):
    lookup = engines.find(place)
    engines._resolver.shutdown()
    assert lookup.error.reason == Reason.UNREACHABLE
    assert asked.empty()


def test_only_the_latest_places_are_remembered(engines, monkeypatch):
    monkeypatch.setattr(module, "MAX_PLACES", 2)
    for port in (1, 2, 3):
        engines.find(f"127.0.0.1:{port}")
    assert list(engines._lookups) == [("127.0.0.1:2", 0), ("127.0.0.1:3", 0)]
    engines.heard(Located("tcp://127.0.0.1:2", ENGINE))
    engines.find("127.0.0.1:4")
    # Nor is it known any more how many engines there are at a place that is forgotten.
    assert (list(engines._lookups), engines._sizes) == ([("127.0.0.1:3", 0), ("127.0.0.1:4", 0)], {})


def test_each_engine_of_a_server_with_data_parallelism_is_asked_for_once(engines, asked):
    """A room leads to an engine, of which there are as many as the first answer says."""
    second = RemoteEngine("p0-1", "epoch-2", ("tcp://127.0.0.1:8999",))
    first = engines.find(PLACE, 7)
    assert asked.get(timeout=DEADLINE_S) == (ADDRESS, 7)
    engines.heard(Located(ADDRESS, second, 7, data_parallel_size=2))
    assert [engines.find(PLACE, room).engine for room in (7, 9, 1)] == [second] * 3 == [first.engine] * 3
    assert asked.empty()
    even = engines.find(PLACE, 8)
    assert (asked.get(timeout=DEADLINE_S), even.engine) == (ADDRESS, None)
    engines.heard(Located(ADDRESS, ENGINE, 0, data_parallel_size=2))
    assert (even.engine, engines.find(PLACE, 10).engine, asked.empty()) == (ENGINE, ENGINE, True)
    # After another start there may be another number of them.
    engines.forget(PLACE)
    assert engines.find(PLACE, 9).engine is None
    assert asked.get(timeout=DEADLINE_S) == (ADDRESS, 9)


def test_an_answer_for_a_place_that_was_forgotten_says_nothing_of_those_who_are_there_now(engines, asked):
    earlier = engines.find(PLACE, 7)
    engines.forget(PLACE)
    engines.heard(Located(ADDRESS, ENGINE, 7, data_parallel_size=2))
    assert (earlier.engine, engines.find(PLACE, 7).engine) == (ENGINE, None)
    assert [asked.get(timeout=DEADLINE_S) for _ in range(2)] == [(ADDRESS, 7)] * 2


def test_an_agent_that_stops_is_an_error_of_all_that_wait_and_of_what_comes_later(engines, asked):
    waiting = engines.find(PLACE)
    asked.get(timeout=DEADLINE_S)
    engines.stop(GONE)
    assert waiting.error is GONE
    assert engines.find("127.0.0.1:9").error is GONE
    assert asked.empty()
