"""Requests in a room, in both halves of vLLM's connector: what their caches are called, and the token that follows."""

import pytest

pytest.importorskip("vllm.v1", reason="needs vLLM's own environment")

from test_vllm_promised import BLOCKS, ID, PROMPT, orders, scheduler, step
from test_vllm_scheduler import begun, end, request
from test_vllm_worker import NOTHING, REPORT, Rank
from vllm.v1.request import RequestStatus

from kvferry import FirstToken, Located, LocateFailed, RemoteEngine, TokenRange
from kvferry.connectors.vllm.metadata import EndOrder, GrowthOrder, Orders, PromiseOrder
from kvferry.errors import RequestError, TransferError
from kvferry.kv_transfer_params import room_names, room_params
from kvferry.plan.description.prompt import Prompt
from kvferry.session.commands import AgentStopped, Fetched

ROOM = 5
NAME, LEASE_ID = room_names(ROOM)
ADDRESS = "tcp://127.0.0.1:8998"
ENGINE = RemoteEngine("sglang", "e1", (ADDRESS, "tcp://127.0.0.1:9001"))


def in_room(request_id=ID, room=ROOM, **more):
    return request({"do_remote_decode": True, "kvferry": {"room": room}, **more}, request_id, PROMPT)


def entered(made=None, request_id=ID, room=ROOM):
    made, asked = made or scheduler(), in_room(request_id, room)
    made.on_new_request(asked)
    return made, asked


def finished(made, asked, status=RequestStatus.FINISHED_LENGTH_CAPPED, tokens=(17,), blocks=BLOCKS):
    asked.append_output_token_ids(list(tokens))
    end(asked, status)
    return made.finished(asked, blocks)


class TestPrefill:
    def test_the_cache_is_promised_under_the_rooms_name_and_ends_with_the_first_token(self):
        made, asked = entered()
        assert orders(made).promises == [PromiseOrder(NAME, LEASE_ID, PROMPT, Prompt.of(range(PROMPT)))]
        told = orders(made, step([(ID, 0, 16)], is_first=True)).growths + orders(made, step([(ID, 16, 24)])).growths
        # Its reader must not have all tokens before it can be told which one follows.
        assert told == [GrowthOrder(NAME, ((3, 4, 5),), num_tokens) for num_tokens in (16, PROMPT - 1)]
        assert finished(made, asked) == (True, None)
        assert orders(made).ended == [EndOrder(ID, NAME, ((3, 4, 5),), PROMPT, True, FirstToken(17))]

    def test_a_request_that_is_in_no_room_says_what_follows_what_it_offers(self):
        made = scheduler()
        for tokens, num_computed, first in (((17,), PROMPT, 17), ((17, 18), PROMPT + 1, 18), ((), PROMPT, None)):
            asked = request({"do_remote_decode": True}, ID, PROMPT)
            made.on_new_request(asked)
            asked.append_output_token_ids(list(tokens))
            end(asked, RequestStatus.FINISHED_LENGTH_CAPPED)
            asked.num_computed_tokens = num_computed
            made.finished(asked, BLOCKS)
            (lease,) = orders(made).leases
            assert (lease.num_tokens, lease.first_token) == (num_computed, first and FirstToken(first))

    def test_a_room_is_for_one_request_until_every_rank_has_ended_its_lease(self):
        made, asked = entered()
        entered(made, "cmpl-second")
        finished(made, asked)
        entered(made, "cmpl-third")
        assert [order.name for order in orders(made).promises] == [NAME]
        made.sent(["cmpl-other", ID])
        entered(made, "cmpl-fourth")
        assert [order.name for order in orders(made).promises] == [NAME]

    def test_who_finds_the_room_taken_is_offered_as_without_one(self):
        made, _ = entered()
        _, second = entered(made, "cmpl-second")
        stays, params = finished(made, second)
        (lease,) = orders(made).leases
        assert (stays, params["kvferry"]["lease_id"]) == (True, lease.lease_id)
        assert lease.lease_id != LEASE_ID

    @pytest.mark.parametrize("blocks", [([],), BLOCKS])
    def test_a_room_whose_lease_was_taken_back_is_not_used_again(self, blocks):
        """Of the end of that lease vLLM hears nothing."""
        made, asked = entered()
        orders(made, step([(ID, 0, 16)], is_first=True))
        if blocks == BLOCKS:
            orders(made, step(preempted=[ID]))
        assert finished(made, asked, RequestStatus.FINISHED_ABORTED, blocks=blocks) == (False, None)
        entered(made, "cmpl-second")
        entered(made, "cmpl-third", ROOM + 1)
        assert [order.name for order in orders(made).promises] == [room_names(ROOM + 1)[0]]

    @pytest.mark.parametrize("room", ["5", "\ud800", -1, 1 << 63, None, [5]])
    def test_a_room_that_is_none_ends_nothing(self, room):
        made, asked = entered(room=room)
        assert orders(made).promises == []
        assert finished(made, asked)[0]

    def test_a_request_that_also_fetches_is_in_no_room(self):
        made = scheduler()
        made.on_new_request(in_room(do_remote_prefill=True))
        assert orders(made).promises == []
        entered(made, "cmpl-second")
        assert len(orders(made).promises) == 1


class TestDecode:
    def test_all_but_the_last_token_is_fetched_from_whoever_listens_there(self):
        made, asked = scheduler(), request(room_params(ROOM, "127.0.0.1", 8998), ID, PROMPT)
        assert begun(made, asked) == PROMPT - 1
        told = orders(made)
        (fetch,) = told.fetches
        assert (told.holds, fetch.is_located, fetch.addresses) == ([], False, (ADDRESS,))
        assert fetch.prompt == Prompt.of(range(PROMPT)).name(LEASE_ID, PROMPT - 1)
        located = fetch.at(ENGINE)
        assert (located.is_located, located.addresses) == (True, ENGINE.addresses)
        assert (located.reference.engine_id, located.reference.lease_id) == ("sglang", LEASE_ID)

    def test_another_host_without_a_token_is_refused(self):
        made, asked = scheduler(), request(room_params(ROOM, "10.0.0.5", 8998), ID, PROMPT)
        begun(made, asked)
        (fetch,) = orders(made).fetches
        assert "is another host" in fetch.error


@pytest.fixture
def rank():
    made = Rank()
    made.agent.located = []
    made.agent.locate = lambda *asked: made.agent.located.append(asked)
    return made


def fetch_of(request_id):
    made, asked = scheduler(), request(room_params(ROOM, "127.0.0.1", 8998), request_id, PROMPT)
    begun(made, asked)
    return orders(made).fetches[0]


class TestWorker:
    def test_an_address_is_asked_for_once_and_everyone_is_fetched_then(self, rank):
        rank.worker.obey(Orders(fetches=[fetch_of("a"), fetch_of("b")]))
        assert (rank.agent.located, rank.agent.wanted) == ([(ADDRESS, ROOM)], [])
        assert rank.says(Located(ADDRESS, ENGINE, ROOM)) == NOTHING
        assert [(each.request_id, each.reference.epoch, each.addresses) for each in rank.agent.wanted] == [
            (name, "e1", ENGINE.addresses) for name in ("a", "b")
        ]
        assert rank.agent.wanted[0].ranges == (TokenRange(0, PROMPT - 1),)
        assert rank.says(Fetched("a", REPORT), Fetched("b", REPORT)) == (set(), {"a", "b"}, set())
        rank.worker.obey(Orders(fetches=[fetch_of("c")]))
        assert rank.agent.located == [(ADDRESS, ROOM), (ADDRESS, ROOM)]

    def test_nobody_there_is_a_failure_that_is_told_once(self, rank):
        rank.worker.obey(Orders(fetches=[fetch_of("a")]))
        nobody = LocateFailed(ADDRESS, TransferError("deadline", "nobody has said who it is"), ROOM)
        assert rank.says(nobody) == (set(), {"a"}, {"a"})
        assert rank.says(nobody, AgentStopped()) == NOTHING

    def test_who_is_aborted_meanwhile_is_not_fetched(self, rank):
        rank.worker.obey(Orders(fetches=[fetch_of("a"), fetch_of("b")], aborted=["a"]))
        assert rank.says(Located(ADDRESS, ENGINE, ROOM)) == (set(), {"a"}, {"a"})
        assert ([each.request_id for each in rank.agent.wanted], rank.agent.aborted) == (["b"], [])

    def test_an_agent_that_dies_meanwhile_is_told_once(self, rank):
        rank.worker.obey(Orders(fetches=[fetch_of("a"), fetch_of("b")]))
        rank.agent.alive = False
        assert rank.says(Located(ADDRESS, ENGINE, ROOM), AgentStopped()) == (set(), {"a", "b"}, {"a", "b"})
        assert rank.told() == NOTHING

    def test_a_promise_that_the_agent_refuses_ends_with_its_request(self, rank):
        def refuse(wanted):
            raise RequestError("the request has a lease already")

        rank.agent.lease = refuse
        rank.worker.obey(
            Orders(promises=[PromiseOrder(NAME, LEASE_ID, PROMPT)], growths=[GrowthOrder(NAME, ((3,),), 16)])
        )
        end_order = EndOrder(ID, NAME, ((3, 4, 5),), PROMPT, True, FirstToken(17))
        rank.worker.obey(Orders(ended=[end_order]))
        assert rank.told() == ({ID}, set(), set())
        assert rank.agent.grown == []

    def test_the_first_token_goes_with_the_end_of_the_prompt(self, rank):
        rank.worker.obey(Orders(promises=[PromiseOrder(NAME, LEASE_ID, PROMPT)]))
        rank.worker.obey(Orders(ended=[EndOrder(ID, NAME, ((3, 4, 5),), PROMPT, True, FirstToken(17))]))
        assert [(each.num_ready, each.first_token) for each in rank.agent.grown] == [(PROMPT, FirstToken(17))]
