"""Both ends of hand-offs out of a GPU that shares no memory: one is lost, the next ones come through host memory."""

import asyncio
from dataclasses import replace

import pytest

from fake_block_kernel import FakeGpuMemory
from fake_cuda import FakeMachine, importing
from handoffs import LAYOUT, TOKEN, FakeConsumerEngine, FakeHolderEngine, an_open, cached, pool_handle, prefill
from kvtransfer.errors import Code, PoolUnreachable
from kvtransfer.events import Computed, Filled
from kvtransfer.holder import HolderEnd
from kvtransfer.loopback import LoopbackMemory, LoopbackTransport
from kvtransfer.messages import Open
from kvtransfer.ports import HolderPool
from kvtransfer.provider import Provider
from kvtransfer.puller import Puller
from kvtransfer.staging import stage_pool
from kvtransfer.unmappable import MAX_PEERS, UnmappablePools

BYTES = LAYOUT.bytes_per_block
SIZE = 16 * BYTES


class Pair:
    """A holder whose pool cannot be mapped, and a consumer; both pools are on a GPU."""

    def __init__(self, stages: bool = True) -> None:
        self.machine = FakeMachine(shares_memory=False)
        self.holder, self.consumer = self.machine.process(), self.machine.process()
        self.source, self.target = FakeGpuMemory(SIZE, 0, self.holder), FakeGpuMemory(SIZE, 0, self.consumer)
        self.holder_engine = FakeHolderEngine()
        staged = stage_pool(self.holder_engine, self.source, LAYOUT, "holder-1", nbytes=16 * BYTES)
        assert staged is not None
        self.staged = staged
        pool = HolderPool(self.source.handle("holder-1", LAYOUT), LAYOUT)
        self.provider = Provider(pool, self.holder_engine, staged=self.staged if stages else None)
        self.transport = LoopbackTransport()
        self.transport.providers["holder"] = self.provider
        self.engine = FakeConsumerEngine()
        self.puller = Puller(self.target, LAYOUT, self.engine, self.transport)
        self.num_pulls = 0
        self.stream = self.holder.stream_create()

    async def pull(self, open: Open | None = None) -> str:
        """Begins a hand-off with an engine that has heard nothing yet; returns its id."""
        self.num_pulls += 1
        self.puller.port = self.engine = FakeConsumerEngine()
        handoff_id = f"handoff-{self.num_pulls}"
        self.holder_engine.asked.clear()
        self.puller.pull("holder", open or an_open(prefill(8), handoff_id=handoff_id), [(9, 3)])
        async with asyncio.timeout(10):
            await self.holder_engine.asked.wait()
        return handoff_id

    async def compute(self, handoff_id: str) -> None:
        """Both blocks, by a step that nobody has waited for yet."""
        blocks = self.holder.view(self.source.pointer + 5 * BYTES, 2 * BYTES)
        self.holder.launch(self.stream, lambda: blocks.__setitem__(slice(None), b"\x07" * BYTES + b"\x08" * BYTES))
        fence = self.source.record_fence(self.stream)
        self.holder_engine.pins.update((5, 6))
        self.holder_engine.say(handoff_id, Filled(0, (5, 6), 8, fence=fence))
        self.holder_engine.say(handoff_id, Computed((TOKEN,), 8))
        async with asyncio.timeout(10):
            await self.engine.over.wait()
            await self.provider.wait_idle()

    def target_block(self, block_id: int) -> bytes:
        return bytes(self.consumer.view(self.target.pointer + block_id * BYTES, BYTES))

    async def close(self) -> None:
        await self.puller.close()
        self.provider.close()
        await self.staged.close()
        assert self.holder_engine.num_pins == 0
        self.staged.check_integrity()
        self.holder.stream_destroy(self.stream)
        self.target.close()
        self.source.close()
        self.machine.assert_nothing_left()


async def test_a_pool_that_cannot_be_mapped_fails_one_hand_off_and_the_next_ones_come_staged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pair = Pair()
    with importing(pair.consumer):
        await pair.compute(await pair.pull())
        lost = pair.engine.lost
        assert lost is not None
        assert (lost.code, lost.is_unmappable, lost.num_confirmed_blocks) == (Code.UNAVAILABLE, True, 0)
        for _ in range(3):
            await pair.compute(await pair.pull())
            assert pair.engine.result is not None
            assert pair.engine.result.stats.bytes == 2 * BYTES
            assert (pair.target_block(9), pair.target_block(3)) == (b"\x07" * BYTES, b"\x08" * BYTES)
            assert pair.engine.sampled == [TOKEN]
    taken, given = pair.puller.counters, pair.provider.counters
    assert (taken.opened, taken.committed, taken.staged, taken.unmappable_pools) == (4, 3, 3, 1)
    assert (given.opened, given.staged, given.ends[HolderEnd.DONE]) == (4, 3, 3)
    warnings = [record.message for record in caplog.records]
    assert len(warnings) == 1
    assert warnings[0].startswith("the pool of worker holder-1 at holder cannot be mapped, its blocks come through ")
    await pair.close()


async def test_a_cached_prefix_comes_staged_too() -> None:
    pair = Pair()
    with importing(pair.consumer):
        await pair.compute(await pair.pull())
        pair.holder.view(pair.source.pointer + 5 * BYTES, 2 * BYTES)[:] = b"\x07" * BYTES + b"\x08" * BYTES
        pair.holder_engine.cached_blocks = (5, 6)
        await pair.pull(an_open(cached(2), handoff_id="cached"))
        async with asyncio.timeout(10):
            await pair.engine.over.wait()
        assert pair.engine.result is not None
        assert pair.engine.result.num_blocks == 2
        assert (pair.target_block(9), pair.target_block(3)) == (b"\x07" * BYTES, b"\x08" * BYTES)
    await pair.close()


async def test_a_holder_that_stages_nothing_says_so() -> None:
    pair = Pair(stages=False)
    with importing(pair.consumer):
        await pair.compute(await pair.pull())
        pair.puller.port = pair.engine = FakeConsumerEngine()
        pair.puller.pull("holder", an_open(handoff_id="staged"), [(9, 3, 4)])
        async with asyncio.timeout(10):
            await pair.engine.over.wait()
        lost = pair.engine.lost
        assert lost is not None
        assert (lost.code, lost.is_unmappable) == (Code.FAILED_PRECONDITION, False)
        assert lost.message == "this worker hands out no copies in host memory: its pool is of kind 'cuda_ipc'"
        assert pair.provider.counters.staged == 0
        assert not pair.puller.unmappable.has("holder"), "another instance may be there: found out anew"
    await pair.close()


@pytest.mark.parametrize("noticed", ["dead", "by its answer", "by its refusal"])
async def test_another_instance_of_a_peer_is_tried_directly_again(noticed: str) -> None:
    pair = Pair()
    with importing(pair.consumer):
        await pair.compute(await pair.pull())
        assert pair.puller.unmappable.has("holder")
        # A worker whose pool can be mapped has taken its place.
        memory = LoopbackMemory(SIZE)
        memory.buffer[5 * BYTES : 7 * BYTES] = b"\x01" * BYTES + b"\x02" * BYTES
        staged = replace(pair.staged.pool.handle, instance_id="holder-2")
        pair.staged.pool = HolderPool(staged, LAYOUT)
        pool = HolderPool(memory.handle("holder-2", LAYOUT), LAYOUT)
        stages = None if noticed == "by its refusal" else pair.staged
        pair.provider = Provider(pool, pair.holder_engine, staged=stages)
        pair.transport.providers["holder"] = pair.provider
        if noticed == "dead":
            del pair.transport.providers["holder"]
        if noticed == "by its answer":
            await pair.compute(await pair.pull())
            assert pair.engine.result is not None
            assert pair.puller.counters.staged == 1
        else:
            pair.puller.port = pair.engine = FakeConsumerEngine()
            pair.puller.pull("holder", an_open(), [(9, 3, 4)])
            async with asyncio.timeout(10):
                await pair.engine.over.wait()
            assert pair.engine.lost is not None
            pair.transport.providers["holder"] = pair.provider
        assert not pair.puller.unmappable.has("holder")
        handoff_id = await pair.pull()
        assert not pair.holder_engine.opened[handoff_id].staged
        pair.holder_engine.fill(handoff_id, 0, (5, 6), 8)
        pair.holder_engine.compute(handoff_id, 8)
        async with asyncio.timeout(10):
            await pair.engine.over.wait()
        assert pair.engine.result is not None
        assert (pair.target_block(9), pair.target_block(3)) == (b"\x01" * BYTES, b"\x02" * BYTES)
    await pair.close()
    memory.close()


async def test_a_pool_in_host_memory_that_is_gone_is_no_reason_to_stage() -> None:
    pair = Pair()
    memory = LoopbackMemory(SIZE)
    pair.provider = Provider(HolderPool(memory.handle("holder-1", LAYOUT), LAYOUT), pair.holder_engine)
    pair.transport.providers["holder"] = pair.provider
    memory.close()
    await pair.compute(await pair.pull())
    assert pair.engine.lost is not None
    assert not pair.engine.lost.is_unmappable
    assert not pair.puller.unmappable.has("holder")
    assert pair.puller.counters.unmappable_pools == 0
    await pair.close()


def test_a_pool_in_host_memory_needs_no_staging() -> None:
    memory = LoopbackMemory(SIZE)
    assert stage_pool(FakeHolderEngine(), memory, LAYOUT, "holder-1") is None
    memory.close()


def test_what_is_known_of_peers_is_bounded_and_said_once_an_instance(caplog: pytest.LogCaptureFixture) -> None:
    pools = UnmappablePools()
    error = PoolUnreachable("no way")
    for i in range(MAX_PEERS + 5):
        assert pools.found(f"host:{i}", pool_handle(instance_id=f"instance-{i}"), error)
    assert [pools.has(f"host:{i}") for i in (0, 4, 5, MAX_PEERS + 4)] == [False, False, True, True]
    assert len(caplog.records) == MAX_PEERS + 5
    assert not pools.found("host:5", pool_handle(instance_id="instance-5"), error)
    pools.met("host:5", "instance-5")
    assert pools.has("host:5")
    pools.met("host:5", "instance-6")
    assert not pools.has("host:5")
    pools.met("host:5", "instance-6")
    pools.forget("host:5")
    assert len(caplog.records) == MAX_PEERS + 5
