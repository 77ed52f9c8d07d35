"""What only a network can do to a hand-off: kill, cancel, talk nonsense, be too long."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from handoffs import LAYOUT, TOKEN, FakeConsumerEngine, FakeHolderEngine, an_open, computed, pool_handle, prefill
from kvtransfer.channels import CHANNEL_OPTIONS, SERVER_OPTIONS, Options
from kvtransfer.client import GrpcTransport
from kvtransfer.errors import Code
from kvtransfer.holder import HolderEnd
from kvtransfer.loopback import LoopbackMemory
from kvtransfer.messages import HandoffTimes, Pulled
from kvtransfer.ports import HolderPool
from kvtransfer.provider import Provider
from kvtransfer.puller import Puller
from kvtransfer.service import KvExchangeService
from kvtransfer.wire import request_to_wire
from tandem.v1 import exchange_pb2, exchange_pb2_grpc

TABLE = (9, 10, 3, 4)
Call = grpc.aio.StreamStreamCall[exchange_pb2.HandoffRequest, exchange_pb2.HandoffResponse]


# The times of CHANNEL_OPTIONS and SERVER_OPTIONS, twenty times as fast.
FAST_CHANNEL_OPTIONS, FAST_SERVER_OPTIONS = (
    [(name, value // 20 if name.endswith(("time_ms", "timeout_ms")) else value) for name, value in options]
    for options in (CHANNEL_OPTIONS, SERVER_OPTIONS)
)


def start_process(script: str, argument: str) -> subprocess.Popen[str]:
    tests = Path(__file__).parents[1]
    path = f"{tests.parent}:{tests.parent / 'proto'}:{tests}"
    return subprocess.Popen(
        [sys.executable, Path(__file__).with_name(script), argument],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )


class HolderProcess:
    def __init__(self, port: int = 0) -> None:
        self.process = start_process("holder_process.py", str(port))
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())
        self.address = f"127.0.0.1:{self.port}"

    def kill(self) -> None:
        with self.process:  # waits, and closes its pipe
            self.process.kill()


@pytest.fixture
def holder_process() -> Iterator[HolderProcess]:
    holder = HolderProcess()
    yield holder
    holder.kill()


@pytest.fixture
async def puller() -> AsyncIterator[Puller]:
    memory = LoopbackMemory(16 * LAYOUT.bytes_per_block)
    puller = Puller(memory, LAYOUT, FakeConsumerEngine(), GrpcTransport())
    yield puller
    await puller.close()


class Server:
    """A holder in this process, and a bare stub to talk to it."""

    def __init__(self, times: HandoffTimes | None = None, options: Options = SERVER_OPTIONS) -> None:
        self.engine = FakeHolderEngine()
        self.provider = Provider(HolderPool(pool_handle(), LAYOUT), self.engine, times)
        self.server = grpc.aio.server(options=options)
        exchange_pb2_grpc.add_KvExchangeServicer_to_server(  # type: ignore[no-untyped-call]
            KvExchangeService(self.provider), self.server
        )
        self.address = f"127.0.0.1:{self.server.add_insecure_port('127.0.0.1:0')}"
        self.channel = grpc.aio.insecure_channel(self.address, options=CHANNEL_OPTIONS)

    def call(self, timeout: float = 10.0) -> Call:
        stub = exchange_pb2_grpc.KvExchangeStub(self.channel)  # type: ignore[no-untyped-call]
        call: Call = stub.Handoff(timeout=timeout)
        return call

    async def stop(self) -> None:
        await self.channel.close(None)
        await self.server.stop(None)


@pytest.fixture
def times() -> HandoffTimes:
    return HandoffTimes()


@pytest.fixture
async def server(times: HandoffTimes) -> AsyncIterator[Server]:
    server = Server(times)
    await server.server.start()
    yield server
    await server.stop()
    async with asyncio.timeout(10):
        await server.provider.wait_idle()
    assert server.engine.num_pins == 0


async def end_of(call: Call) -> grpc.StatusCode:
    """How a call ends, whatever is said before."""
    try:
        while isinstance(await call.read(), exchange_pb2.HandoffResponse):
            pass
    except grpc.aio.AioRpcError as error:
        return error.code()
    return await call.code()


def engine_of(puller: Puller) -> FakeConsumerEngine:
    assert isinstance(puller.port, FakeConsumerEngine)
    return puller.port


async def over(puller: Puller) -> None:
    async with asyncio.timeout(10):
        await engine_of(puller).over.wait()


async def two_blocks_committed(puller: Puller) -> None:
    engine = engine_of(puller)
    async with asyncio.timeout(10):
        while engine.num_committed_blocks < 2:
            engine.changed.clear()
            await engine.changed.wait()


async def test_a_killed_holder_is_lost_at_once_with_what_it_confirmed(
    holder_process: HolderProcess, puller: Puller
) -> None:
    puller.pull(holder_process.address, an_open(), [TABLE])
    await two_blocks_committed(puller)
    holder_process.kill()
    async with asyncio.timeout(1):
        await engine_of(puller).over.wait()
    lost = engine_of(puller).lost
    assert lost is not None
    assert (lost.code, lost.num_confirmed_blocks) == (Code.UNAVAILABLE, 2)
    assert len(puller.pools) == 0, "its pool is not mapped any more"


async def test_a_frozen_holder_is_lost_when_it_misses_its_keepalives(holder_process: HolderProcess) -> None:
    memory = LoopbackMemory(16 * LAYOUT.bytes_per_block)
    puller = Puller(memory, LAYOUT, FakeConsumerEngine(), GrpcTransport(options=FAST_CHANNEL_OPTIONS))
    puller.pull(holder_process.address, an_open(), [TABLE])
    await two_blocks_committed(puller)
    holder_process.process.send_signal(signal.SIGSTOP)
    await over(puller)
    lost = engine_of(puller).lost
    assert lost is not None
    assert (lost.code, lost.num_confirmed_blocks) == (Code.UNAVAILABLE, 2)
    await puller.close()


async def test_a_holder_restarted_at_its_address_serves_the_next_hand_off(
    holder_process: HolderProcess, puller: Puller
) -> None:
    puller.pull(holder_process.address, an_open(), [TABLE])
    await two_blocks_committed(puller)
    holder_process.kill()
    await over(puller)
    again = HolderProcess(holder_process.port)
    try:
        puller.port = FakeConsumerEngine()
        puller.pull(again.address, an_open(handoff_id="handoff-2"), [TABLE])
        await two_blocks_committed(puller)
        assert engine_of(puller).lost is None
    finally:
        puller.abort("request-1")
        again.kill()


async def test_a_channel_is_shared_kept_while_used_and_closed_when_it_is_not(server: Server) -> None:
    memory = LoopbackMemory(16 * LAYOUT.bytes_per_block)
    transport = GrpcTransport(idle_s=0.0)
    puller = Puller(memory, LAYOUT, FakeConsumerEngine(), transport)
    for i in range(2):
        puller.pull(server.address, an_open(request_id=f"r{i}", handoff_id=f"h{i}"), [TABLE])
    assert len(transport._channels) == 1
    for i in range(2):
        puller.port = FakeConsumerEngine()
        puller.abort(f"r{i}")
        await over(puller)
    async with asyncio.timeout(10):
        while transport._channels:
            await asyncio.sleep(0)  # the loop goes round
    await puller.close()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_consumer_that_is_killed_or_frozen_holds_no_block(how: signal.Signals) -> None:
    server = Server(options=FAST_SERVER_OPTIONS)
    await server.server.start()
    with start_process("consumer_process.py", server.address) as consumer:
        try:
            async with asyncio.timeout(10):
                await server.engine.asked.wait()
            consumer.send_signal(how)
            server.engine.fill("handoff-1", 0, [5, 6], 8)
            async with asyncio.timeout(10):
                await server.provider.wait_idle()
            assert server.engine.num_pins == 0
            assert server.provider.counters.ends[HolderEnd.STREAM] == 1
        finally:
            consumer.kill()
    await server.stop()


async def test_a_holder_that_stops_serving_is_lost(server: Server, puller: Puller) -> None:
    puller.pull(server.address, an_open(), [TABLE])
    async with asyncio.timeout(10):
        await server.engine.asked.wait()
    await server.server.stop(None)
    await over(puller)
    lost = engine_of(puller).lost
    assert lost is not None
    assert lost.code in (Code.UNAVAILABLE, Code.CANCELLED)


async def test_a_prompt_of_millions_of_tokens_fits_into_a_message(server: Server) -> None:
    num_tokens = 2_200_000
    num_blocks = num_tokens // LAYOUT.block_size
    memory = LoopbackMemory(16 * LAYOUT.bytes_per_block)
    puller = Puller(memory, LAYOUT, FakeConsumerEngine(), GrpcTransport())
    source = prefill(num_tokens, skip_blocks=num_blocks)
    puller.pull(server.address, an_open(source), [range(num_blocks)])
    async with asyncio.timeout(60):
        await server.engine.asked.wait()
    assert server.engine.opened["handoff-1"].source == source
    server.engine.fill("handoff-1", 0, range(1, num_blocks + 1), num_tokens)
    server.engine.compute("handoff-1", num_tokens)
    await over(puller)
    assert engine_of(puller).sampled == [TOKEN]
    await puller.close()


async def test_log_probabilities_of_a_long_prompt_fit_into_a_message(server: Server, puller: Puller) -> None:
    """Past gRPC's default limit of 4 MiB."""
    source = prefill(60_000, prompt_logprobs=20)
    blocks = range(1, len(source.token_ids) // LAYOUT.block_size + 1)
    puller.pull(server.address, an_open(replace(source, skip_blocks=len(blocks))), [blocks])
    async with asyncio.timeout(60):
        await server.engine.asked.wait()
    server.engine.fill("handoff-1", 0, blocks, len(source.token_ids))
    server.engine.compute("handoff-1", len(source.token_ids))
    await over(puller)
    logprobs = engine_of(puller).prompt_logprobs
    assert logprobs is not None
    assert logprobs.ByteSize() > 4 << 20
    assert logprobs == computed(source).prompt_logprobs


async def test_a_list_of_blocks_longer_than_a_default_message_arrives(server: Server) -> None:
    call = server.call(timeout=60)
    num_blocks = 1_500_000
    await call.write(request_to_wire(an_open(prefill(num_blocks * LAYOUT.block_size))))
    await call.read()
    server.engine.fill("handoff-1", 0, range(300_000_000, 300_000_000 + num_blocks), 1)
    response = await call.read()
    assert isinstance(response, exchange_pb2.HandoffResponse)
    assert len(response.ready.block_ids) == num_blocks
    assert response.ByteSize() > 4 << 20
    call.cancel()


async def test_hand_offs_cancelled_by_the_dozen_leave_the_next_one_served(server: Server, puller: Puller) -> None:
    for i in range(24):
        call = server.call()
        await call.write(request_to_wire(an_open(handoff_id=f"cancelled-{i}")))
        await call.read()
        server.engine.fill(f"cancelled-{i}", 0, [5, 6], 8)
        call.cancel()
    async with asyncio.timeout(10):
        await server.provider.wait_idle()
    assert server.engine.num_pins == 0
    assert server.provider.counters.ends[HolderEnd.STREAM] == 24
    assert server.engine.aborted == [f"cancelled-{i}" for i in range(24)]
    call = server.call()
    await call.write(request_to_wire(an_open()))
    assert isinstance(await call.read(), exchange_pb2.HandoffResponse)
    call.cancel()


async def test_a_calls_own_deadline_ends_the_hand_off(server: Server) -> None:
    call = server.call(timeout=0.05)
    await call.write(request_to_wire(an_open()))
    assert await end_of(call) is grpc.StatusCode.DEADLINE_EXCEEDED
    async with asyncio.timeout(1):
        await server.provider.wait_idle()


async def test_a_consumer_that_ends_its_side_early_ends_the_hand_off(server: Server) -> None:
    call = server.call()
    await call.write(request_to_wire(an_open()))
    await call.done_writing()
    assert await end_of(call) is grpc.StatusCode.CANCELLED
    assert server.provider.counters.ends[HolderEnd.STREAM] == 1


NONSENSE = {
    "nothing at all": (grpc.StatusCode.CANCELLED, []),
    "an empty message": (grpc.StatusCode.INVALID_ARGUMENT, [exchange_pb2.HandoffRequest()]),
    "a copy before the open": (grpc.StatusCode.INVALID_ARGUMENT, [request_to_wire(Pulled(1))]),
    "no source": (grpc.StatusCode.INVALID_ARGUMENT, [exchange_pb2.HandoffRequest(open=exchange_pb2.Open())]),
    "no tokens": (grpc.StatusCode.INVALID_ARGUMENT, [request_to_wire(an_open(prefill(0)))]),
    "a second open": (grpc.StatusCode.INVALID_ARGUMENT, [request_to_wire(an_open())] * 2),
    "an empty message later": (
        grpc.StatusCode.INVALID_ARGUMENT,
        [request_to_wire(an_open()), exchange_pb2.HandoffRequest()],
    ),
    "copies of nothing": (
        grpc.StatusCode.INVALID_ARGUMENT,
        [request_to_wire(an_open()), request_to_wire(Pulled(2))],
    ),
}


@pytest.mark.parametrize("what", NONSENSE)
async def test_a_consumer_that_talks_nonsense_is_told_so(server: Server, what: str) -> None:
    code, requests = NONSENSE[what]
    call = server.call()
    for request in requests:
        await call.write(request)
    if not requests:
        await call.done_writing()
    assert await end_of(call) is code


class TestSilence:
    @pytest.fixture
    def times(self) -> HandoffTimes:
        return HandoffTimes(answer_s=0.05)

    async def test_a_consumer_that_never_opens_is_let_go(self, server: Server) -> None:
        call = server.call()
        assert await end_of(call) is grpc.StatusCode.DEADLINE_EXCEEDED
        assert "begins with Open, and none has come" in await call.details()


async def test_a_holder_that_talks_nonsense_is_lost(puller: Puller) -> None:
    class Nonsense(exchange_pb2_grpc.KvExchangeServicer):
        async def Handoff(self, request_iterator: object, context: object) -> AsyncIterator[object]:
            yield exchange_pb2.HandoffResponse()

    server = grpc.aio.server(options=SERVER_OPTIONS)
    exchange_pb2_grpc.add_KvExchangeServicer_to_server(Nonsense(), server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    puller.pull(f"127.0.0.1:{port}", an_open(), [TABLE])
    await over(puller)
    lost = engine_of(puller).lost
    assert lost is not None
    assert lost.code is Code.INTERNAL
    assert "makes no sense: an empty hand-off response" in lost.message
    await server.stop(None)
