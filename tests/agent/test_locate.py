"""Real agents that know of each other only where one of them listens."""

import asyncio
import contextlib
import socket
from dataclasses import replace

import pytest
from engine_server import hold_ports

import kvferry
from kvferry.errors import TransferError
from kvferry.layout import EngineShape, attention, describe

MODEL = attention(num_layers=1, num_heads=2, head_dim=8, dtype="float32", item_bytes=4)
SHAPE = EngineShape(2, 1, block_tokens=4, num_blocks=4, format="block-major")
TIMING = kvferry.Timing(handshake_s=2.0, resend_s=0.1)


@pytest.fixture
def memory():
    shared = kvferry.allocate_shared(SHAPE.num_blocks * SHAPE.block_tokens * MODEL.bytes_per_token, "locate")
    yield shared.memory
    shared.close()


def cache_of(memory):
    return kvferry.Cache(describe(MODEL, SHAPE, memory.address), (memory,))


def config_of(name, rank=0):
    return kvferry.AgentConfig(name, "epoch-1", rank, transport="tcp", timing=TIMING)


async def test_rank_0_answers_for_all_ranks_of_its_engine(memory):
    prefill = [kvferry.open_agent(config_of("prefill", rank), cache_of(memory), print) for rank in (0, 1)]
    addresses = tuple(agent.address for agent in prefill)
    async with kvferry.AsyncAgent(config_of("decode"), cache_of(memory), print) as decode:
        for agent in prefill:
            agent.start(addresses)
        try:
            found = await asyncio.gather(decode.locate(addresses[0]), decode.locate(addresses[0]))
        finally:
            for agent in prefill:
                agent.close()
    assert found == [kvferry.RemoteEngine("prefill", "epoch-1", addresses)] * 2


async def test_an_engine_that_sends_its_askers_to_another_host_is_not_believed(memory):
    """Without a token nobody proves who it is. An error of the lookup, and of nothing else."""
    prefill = kvferry.open_agent(config_of("prefill"), cache_of(memory), print)
    async with kvferry.AsyncAgent(config_of("decode"), cache_of(memory), print) as decode:
        prefill.start((prefill.address, "tcp://192.0.2.1:5000"))
        try:
            with pytest.raises(TransferError, match=r"where nobody may be asked.*found: tcp://192.0.2.1:5000"):
                await decode.locate(prefill.address)
        finally:
            prefill.close()


async def test_of_a_server_with_data_parallelism_that_engine_is_found_which_a_number_leads_to(memory):
    with contextlib.ExitStack() as held:
        port = hold_ports(held, 2)
        prefill = [
            kvferry.open_agent(replace(config_of(f"prefill-{number}"), port=port + number), cache_of(memory), print)
            for number in (0, 1)
        ]
        async with kvferry.AsyncAgent(config_of("decode"), cache_of(memory), print) as decode:
            for agent in prefill:
                agent.start((agent.address,) * 2, 2)
            try:
                asked = (decode.locate(prefill[0].address, room) for room in (6, 7, 9))
                found = [engine.engine_id for engine in await asyncio.gather(*asked)]
            finally:
                for agent in prefill:
                    agent.close()
    assert found == ["prefill-0", "prefill-1", "prefill-1"]


async def located_at(held, memory, handshake_s=30.0):
    config = replace(config_of("decode"), timing=kvferry.Timing(handshake_s=handshake_s, resend_s=0.1))
    async with kvferry.AsyncAgent(config, cache_of(memory), print) as decode:
        await decode.locate("tcp://{}:{}".format(*held.getsockname()))


@pytest.mark.slow
async def test_where_nobody_listens_that_is_said_after_some_seconds(memory):
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        with pytest.raises(TransferError, match=r"nothing listens at tcp://127.0.0.1:\d+; hint: has that engine"):
            await located_at(held, memory)


async def test_where_nobody_says_anything_that_is_said_in_time(memory):
    with socket.create_server(("127.0.0.1", 0)) as held, pytest.raises(TransferError, match="has said who it is"):
        await located_at(held, memory, handshake_s=1.0)


@pytest.mark.slow
async def test_another_program_at_the_address_is_told_from_an_engine(memory):
    async def answer(reader, writer):
        writer.write(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        with pytest.raises(TransferError, match=r"has ended the handshake.*the port of an engine's control channel"):
            await located_at(server.sockets[0], memory)


async def test_an_agent_that_stops_says_so_to_who_waits(memory):
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        async with kvferry.AsyncAgent(config_of("decode"), cache_of(memory), print) as decode:
            waiting = asyncio.ensure_future(decode.locate(f"tcp://127.0.0.1:{held.getsockname()[1]}"))
            await asyncio.sleep(0)
    with pytest.raises(TransferError, match="has stopped"):
        await waiting
    with pytest.raises(TransferError, match="has stopped"):
        await decode.locate("tcp://127.0.0.1:1")
