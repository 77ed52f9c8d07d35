"""Hand-offs between two workers' ends, the same over gRPC and over loopback, out of either kind of pool."""

import asyncio
from collections.abc import AsyncIterator, Callable

import grpc
import numpy as np
import pytest

from handoffs import LAYOUT, TOKEN, FakeConsumerEngine, FakeHolderEngine, an_open, cached, computed, prefill
from kvtransfer.channels import SERVER_OPTIONS
from kvtransfer.client import GrpcTransport
from kvtransfer.errors import Code, HandoffRefused
from kvtransfer.events import CopyEnded, Failed, HolderLost, TransferStats
from kvtransfer.holder import HolderEnd
from kvtransfer.loopback import LoopbackMemory, LoopbackTransport
from kvtransfer.memfd import MemfdMemory
from kvtransfer.messages import HandoffTimes, Open
from kvtransfer.ports import HolderPool
from kvtransfer.provider import Provider
from kvtransfer.puller import Puller
from kvtransfer.service import KvExchangeService
from tandem.v1 import exchange_pb2_grpc

NUM_BLOCKS = 16
SIZE = NUM_BLOCKS * LAYOUT.bytes_per_block
TABLE = (9, 10, 3, 4)


class Pair:
    """A holder and a consumer, their engines and pools."""

    def __init__(self, memory_type: type[MemfdMemory] | type[LoopbackMemory], times: HandoffTimes) -> None:
        self.times = times
        self.holder_memory = memory_type(SIZE)
        self.consumer_memory = memory_type(SIZE)
        self.holder_blocks = np.frombuffer(self.holder_memory.buffer, np.uint8).reshape(NUM_BLOCKS, -1)
        self.consumer_blocks = np.frombuffer(self.consumer_memory.buffer, np.uint8).reshape(NUM_BLOCKS, -1)
        self.holder_blocks[:] = np.arange(NUM_BLOCKS, dtype=np.uint8)[:, None]
        self.consumer_blocks[:] = 255
        self.holder_engine = FakeHolderEngine()
        self.engine = FakeConsumerEngine()
        self.provider = Provider(
            HolderPool(self.holder_memory.handle("holder-1", LAYOUT), LAYOUT), self.holder_engine, times
        )
        self.address = ""
        self.puller: Puller
        self.server: grpc.aio.Server | None = None

    async def start(self, transport: str) -> None:
        if transport == "grpc":
            self.server = grpc.aio.server(options=SERVER_OPTIONS)
            exchange_pb2_grpc.add_KvExchangeServicer_to_server(  # type: ignore[no-untyped-call]
                KvExchangeService(self.provider), self.server
            )
            self.address = f"127.0.0.1:{self.server.add_insecure_port('127.0.0.1:0')}"
            await self.server.start()
            self._make_puller(GrpcTransport())
        else:
            loopback = LoopbackTransport()
            self.address = "holder"
            loopback.providers[self.address] = self.provider
            self._make_puller(loopback)

    def _make_puller(self, transport: GrpcTransport | LoopbackTransport) -> None:
        self.puller = Puller(
            self.consumer_memory, LAYOUT, self.engine, transport, times=self.times, max_bytes_per_copy=128
        )

    async def stop(self) -> None:
        await self.puller.close()
        self.provider.close()
        if self.server is not None:
            await self.server.stop(None)
        self.holder_memory.close()
        self.consumer_memory.close()

    async def open(self, open: Open | None = None) -> Open:
        """Opens a hand-off and waits until the holder's engine was asked."""
        open = open or an_open()
        self.holder_engine.asked.clear()
        self.puller.pull(self.address, open, [TABLE])
        async with asyncio.timeout(10):
            await self.holder_engine.asked.wait()
        return open

    async def over(self) -> None:
        async with asyncio.timeout(10):
            await self.engine.over.wait()

    async def lost(self) -> HolderLost:
        await self.over()
        assert self.engine.lost is not None
        return self.engine.lost

    async def until(self, condition: Callable[[], bool]) -> None:
        """Waits for something at the consumer."""
        async with asyncio.timeout(10):
            while not condition():
                self.engine.changed.clear()
                await self.engine.changed.wait()

    async def holder_is_whole(self) -> None:
        """The holder's side is over too; it may hear of it a little later."""
        async with asyncio.timeout(10):
            await self.provider.wait_idle()
        assert self.holder_engine.num_pins == 0


@pytest.fixture
def times() -> HandoffTimes:
    return HandoffTimes()


@pytest.fixture(params=["grpc", "loopback"])
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=[MemfdMemory, LoopbackMemory])
async def pair(request: pytest.FixtureRequest, transport: str, times: HandoffTimes) -> AsyncIterator[Pair]:
    pair = Pair(request.param, times)
    await pair.start(transport)
    yield pair
    await pair.stop()
    assert pair.provider.num_active == pair.puller.num_active == 0
    assert pair.holder_engine.num_pins == 0
    assert len(pair.puller.pools) == 0


async def test_a_prefill_is_handed_over_chunk_by_chunk(pair: Pair) -> None:
    await pair.open()
    pair.holder_engine.fill("handoff-1", 0, [5, 6], 8)
    await pair.until(lambda: pair.engine.num_committed_blocks == 2)
    assert pair.holder_engine.num_pins == 0, "what is confirmed is not pinned any more"
    assert pair.engine.sampled == []

    pair.holder_engine.fill("handoff-1", 2, [2], 10)
    pair.holder_engine.compute("handoff-1", 10)
    await pair.over()
    result = pair.engine.result
    assert result is not None
    assert pair.engine.sampled == [TOKEN]
    assert pair.engine.num_committed_blocks == result.num_blocks == 3
    assert (result.complete.num_cached_tokens, result.complete.queued_s, result.complete.prefill_s) == (4, 0.25, 0.5)
    assert (result.stats.bytes, result.stats.segments) == (3 * LAYOUT.bytes_per_block, 2)
    assert pair.consumer_blocks[:, 0].tolist() == [255] * 3 + [2, 255, 255, 255, 255, 255, 5, 6] + [255] * 5
    await pair.holder_is_whole()
    assert pair.provider.counters.ends[HolderEnd.DONE] == pair.puller.counters.committed == 1


async def test_the_holders_engine_gets_what_the_consumer_asked_for(pair: Pair) -> None:
    open = await pair.open(an_open(prefill(10, skip_blocks=1)))
    asked = pair.holder_engine.opened["handoff-1"]
    assert asked.source == open.source
    assert (asked.request_id, asked.consumer_instance_id) == (open.request_id, open.consumer_instance_id)


async def test_the_first_tokens_of_several_choices_and_the_prompts_log_probabilities_come_at_once(pair: Pair) -> None:
    source = prefill(10, num_choices=4, prompt_logprobs=20)
    await pair.open(an_open(source))
    assert pair.holder_engine.opened["handoff-1"].source == source
    pair.holder_engine.fill("handoff-1", 0, [5, 6, 7], 10)
    pair.holder_engine.compute("handoff-1", 10)
    await pair.until(lambda: bool(pair.engine.sampled))
    said = computed(source)
    assert pair.engine.sampled == list(said.first_tokens)
    assert pair.engine.prompt_logprobs == said.prompt_logprobs
    await pair.over()
    await pair.holder_is_whole()


async def test_a_cached_prefix_is_handed_over_without_a_first_token(pair: Pair) -> None:
    pair.holder_engine.cached_blocks = (5, 6)
    await pair.open(an_open(cached(3)))
    await pair.over()
    assert pair.engine.result is not None
    assert pair.engine.result.num_blocks == 2
    assert pair.engine.result.complete.num_tokens == 8
    assert pair.engine.sampled == []
    assert pair.consumer_blocks[[9, 10], 0].tolist() == [5, 6]
    await pair.holder_is_whole()
    assert pair.provider.counters.stale_blocks == pair.puller.counters.stale_blocks == 1


async def test_a_hand_off_of_nothing_is_completed_all_the_same(pair: Pair) -> None:
    await pair.open(an_open(prefill(10, skip_blocks=3)))
    pair.holder_engine.fill("handoff-1", 0, [5, 6, 7], 10)
    pair.holder_engine.compute("handoff-1", 10)
    await pair.over()
    assert pair.engine.result is not None
    assert pair.engine.sampled == [TOKEN]
    assert pair.engine.result.stats.bytes == 0
    assert len(pair.puller.pools) == 0, "nothing was mapped for it"
    await pair.holder_is_whole()


async def test_one_request_after_another_uses_one_mapping(pair: Pair) -> None:
    for i in range(3):
        pair.engine.over.clear()
        pair.engine.num_committed_blocks = 0
        await pair.open(an_open(handoff_id=f"h{i}", request_id=f"r{i}"))
        pair.holder_engine.fill(f"h{i}", 0, [5, 6, 7], 10)
        pair.holder_engine.compute(f"h{i}", 10)
        await pair.over()
        assert len(pair.puller.pools) == 1
    await pair.holder_is_whole()


async def test_an_abort_ends_both_sides_and_what_comes_late_is_given_back(pair: Pair) -> None:
    await pair.open()
    pair.holder_engine.fill("handoff-1", 0, [5, 6], 8)
    assert pair.puller.abort("request-1")
    await pair.over()
    assert pair.engine.num_ended == 1
    assert not pair.puller.abort("request-1"), "there is nothing left to abort"
    await pair.holder_is_whole()
    assert pair.holder_engine.aborted == ["handoff-1"]
    pair.holder_engine.fill("handoff-1", 2, [7], 10)
    pair.holder_engine.compute("handoff-1", 10)
    assert pair.holder_engine.num_pins == 0
    assert pair.provider.counters.ends[HolderEnd.STREAM] == pair.puller.counters.aborted == 1


async def test_a_request_that_ends_with_its_first_token_is_aborted_from_within(pair: Pair) -> None:
    aborts: list[bool] = []
    pair.engine.on_first_tokens = lambda: aborts.append(pair.puller.abort("request-1"))  # type: ignore[method-assign]
    await pair.open()
    pair.holder_engine.fill("handoff-1", 0, [5, 6, 7], 10)
    await pair.until(lambda: pair.engine.num_committed_blocks == 3)
    pair.holder_engine.compute("handoff-1", 10)
    await pair.over()
    assert aborts == [True]
    assert (pair.engine.num_ended, pair.engine.result) == (1, None), "the commit was on its way already"
    assert pair.puller.counters.aborted == 1
    await pair.holder_is_whole()


async def test_another_fingerprint_is_refused_before_anything_is_reserved(pair: Pair) -> None:
    pair.puller.pull(pair.address, an_open(fingerprint=b"x" * 16), [TABLE])
    lost = await pair.lost()
    assert lost.code is Code.FAILED_PRECONDITION
    assert "fingerprints differ" in lost.message
    assert pair.holder_engine.opened == {}
    assert pair.provider.counters.ends[HolderEnd.FINGERPRINT] == 1
    assert pair.puller.counters.lost[Code.FAILED_PRECONDITION] == 1


async def test_a_refusal_by_the_holders_engine_arrives_with_its_code_and_words(pair: Pair) -> None:
    pair.holder_engine.refusal = HandoffRefused(Code.RESOURCE_EXHAUSTED, "the queue is full")
    pair.puller.pull(pair.address, an_open(), [TABLE])
    lost = await pair.lost()
    assert (lost.code, lost.message) == (Code.RESOURCE_EXHAUSTED, "the queue is full")
    assert lost.num_confirmed_blocks == 0


async def test_a_failure_of_the_holders_engine_keeps_what_was_confirmed(pair: Pair) -> None:
    await pair.open()
    pair.holder_engine.fill("handoff-1", 0, [5, 6], 8)
    await pair.until(lambda: pair.engine.num_committed_blocks == 2)
    pair.holder_engine.say("handoff-1", Failed(Code.INTERNAL, "the engine died"))
    lost = await pair.lost()
    assert (lost.code, lost.message, lost.num_confirmed_blocks) == (Code.INTERNAL, "the engine died", 2)


async def test_the_hand_off_after_a_lost_one_goes_on_where_it_ended(pair: Pair) -> None:
    await pair.open()
    pair.holder_engine.fill("handoff-1", 0, [5, 6], 8)
    await pair.until(lambda: pair.engine.num_committed_blocks == 2)
    pair.holder_engine.say("handoff-1", Failed(Code.INTERNAL, "the engine died"))
    confirmed = (await pair.lost()).num_confirmed_blocks
    pair.engine.over.clear()
    await pair.open(an_open(prefill(10, skip_blocks=confirmed), handoff_id="handoff-2"))
    pair.holder_engine.fill("handoff-2", 0, [1, 7, 8], 10)
    pair.holder_engine.compute("handoff-2", 10)
    await pair.over()
    assert pair.engine.sampled == [TOKEN]
    assert pair.consumer_blocks[[9, 10, 3], 0].tolist() == [5, 6, 8]
    await pair.holder_is_whole()


async def test_a_worker_that_shuts_down_says_so_to_its_consumers(pair: Pair) -> None:
    await pair.open()
    pair.provider.close()
    lost = await pair.lost()
    assert (lost.code, lost.message) == (Code.UNAVAILABLE, "the worker is shutting down")


async def test_a_consumer_that_shuts_down_ends_its_hand_offs(pair: Pair) -> None:
    await pair.open()
    pair.holder_engine.fill("handoff-1", 0, [5, 6], 8)
    await pair.puller.close()
    assert pair.engine.num_ended == 1
    await pair.holder_is_whole()


async def test_a_pool_that_cannot_be_mapped_is_a_lost_holder(pair: Pair) -> None:
    await pair.open()
    pair.holder_memory.close()
    pair.holder_engine.fill("handoff-1", 0, [5, 6], 8)
    lost = await pair.lost()
    assert lost.code is Code.UNAVAILABLE
    assert "instance holder-1" in lost.message
    await pair.holder_is_whole()


async def test_two_hand_offs_of_one_request_at_a_time_are_the_callers_fault(pair: Pair) -> None:
    await pair.open()
    with pytest.raises(ValueError, match="a hand-off of request request-1 is under way"):
        pair.puller.pull(pair.address, an_open(handoff_id="handoff-2"), [TABLE])
    pair.puller.abort("request-1")
    await pair.over()


async def test_a_hand_off_id_that_is_in_use_is_refused_and_the_first_goes_on(pair: Pair) -> None:
    await pair.open()
    pair.puller.pull(pair.address, an_open(request_id="request-2"), [TABLE])
    assert (await pair.lost()).code is Code.ALREADY_EXISTS
    pair.engine.over.clear()
    pair.holder_engine.fill("handoff-1", 0, [5, 6, 7], 10)
    pair.holder_engine.compute("handoff-1", 10)
    await pair.over()
    assert pair.engine.result is not None


async def test_a_holder_that_nobody_can_reach_is_lost(pair: Pair) -> None:
    pair.puller.pull("127.0.0.1:1", an_open(), [TABLE])
    assert (await pair.lost()).code is Code.UNAVAILABLE


class TestImpatience:
    """What ends by the clock."""

    @pytest.fixture
    def times(self) -> HandoffTimes:
        return HandoffTimes(lease_s=0.5, answer_s=0.5)

    async def test_a_hand_off_that_takes_too_long_ends_on_both_sides(self, pair: Pair) -> None:
        await pair.open(an_open(timeout_s=0.2))
        lost = await pair.lost()
        assert lost.code is Code.DEADLINE_EXCEEDED
        assert pair.puller.counters.lost[Code.DEADLINE_EXCEEDED] == 1
        await pair.holder_is_whole()

    async def test_a_lease_that_expires_in_a_copy_is_told_when_the_copy_has_ended(self, pair: Pair) -> None:
        copies: list[Callable[[CopyEnded], None]] = []
        pair.puller.copier.copy = lambda *copy: copies.append(copy[-1])  # type: ignore[method-assign]
        await pair.open()
        pair.holder_engine.fill("handoff-1", 0, [5, 6], 8)
        await pair.holder_is_whole()
        assert pair.provider.counters.ends[HolderEnd.LEASE] == 1
        assert not pair.engine.over.is_set(), "the copy is still in flight: the blocks belong to nobody else"
        (ended,) = copies
        ended(CopyEnded(TransferStats()))
        lost = await pair.lost()
        assert lost.num_confirmed_blocks == 0
