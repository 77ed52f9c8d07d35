"""KV events: snapshot and tail add up to what the worker caches, over the wire too."""

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest

from decode_worker import DecodeWorker
from engine.config import EngineConfig
from engine.kvcache.block_hash import BlockHash, hash_blocks, root_hash
from engine.kvcache.events import BlocksRemoved, BlocksStored, CacheCleared
from engine.sampling_params import SamplingParams
from gateway_end import PATIENCE_S, GatewayEnd
from tandem.v1 import worker_pb2 as pb
from tandem.v1 import worker_pb2_grpc
from worker.config import WorkerConfig
from worker.kv_events import KvEventPublisher, SubscriberTooSlow

A, B, C = (BlockHash(bytes([i]) * 16) for i in range(3))


async def test_a_snapshot_and_what_follows_add_up_to_what_is_cached() -> None:
    publisher = KvEventPublisher()
    publisher.publish([BlocksStored((A, B))])
    publisher.publish([])  # nothing happened: no number is used up
    subscription = publisher.subscribe()
    assert (subscription.snapshot, subscription.sequence) == ({A, B}, 1)
    publisher.publish([BlocksRemoved((A,)), BlocksStored((C,))])
    publisher.publish([CacheCleared(), BlocksStored((A,))])
    first, second = await subscription.next(timeout=PATIENCE_S), await subscription.next(timeout=PATIENCE_S)
    assert first is not None
    assert second is not None
    assert (first.epoch, first.sequence) == (1, 2)
    assert (second.epoch, second.sequence) == (2, 3)
    assert publisher.subscribe().snapshot == {A}


async def test_a_subscriber_that_does_not_read_is_cut_off_and_others_are_not() -> None:
    publisher = KvEventPublisher(max_backlog=3)
    slow, quick = publisher.subscribe(), publisher.subscribe()
    for i in range(4):
        publisher.publish([BlocksStored((BlockHash(bytes([i]) * 16),))])
        batch = await quick.next(timeout=PATIENCE_S)
        assert batch is not None
        assert batch.sequence == i + 1
    with pytest.raises(SubscriberTooSlow):
        await slow.next(timeout=PATIENCE_S)


async def test_nothing_new_within_the_timeout_is_no_batch() -> None:
    assert await KvEventPublisher().subscribe().next(timeout=0) is None


@pytest.fixture
async def worker() -> AsyncIterator[DecodeWorker]:
    engine = EngineConfig(num_blocks=9, max_model_len=128)
    worker = DecodeWorker(WorkerConfig(engine=engine, worker_id="d0", executor="hash"))
    worker.address = await worker.start()  # type: ignore[attr-defined]
    yield worker
    await worker.stop()


async def test_a_remote_subscriber_knows_the_workers_true_cache(worker: DecodeWorker) -> None:
    address: str = worker.address  # type: ignore[attr-defined]
    params = SamplingParams(max_tokens=1, temperature=0.0)
    prompts = [[(i * 37 + j) % 1000 for j in range(48)] for i in range(6)]

    async with GatewayEnd(address) as gateway, grpc.aio.insecure_channel(address) as channel:
        stub = worker_pb2_grpc.WorkerStub(channel)
        before = stub.SubscribeKvEvents(pb.SubscribeKvEventsRequest())
        begin = (await before.read()).begin
        assert begin.block_size == 16
        root = root_hash(begin.fingerprint)
        assert (await before.read()).WhichOneof("event") == "snapshot_end"
        for i, prompt in enumerate(prompts):  # 18 blocks through a pool of 8
            seen = await gateway.submit(f"r{i}", prompt, params)
            await gateway.until(lambda seen=seen: seen.is_over)

        known: set[bytes] = set()
        sequence = begin.sequence
        newest = set(hash_blocks(root, prompts[-1], 16))
        async with asyncio.timeout(PATIENCE_S):
            while not newest <= known:
                event = await before.read()
                if event.WhichOneof("event") == "heartbeat":
                    assert event.heartbeat.sequence == sequence
                    continue
                assert event.batch.sequence == sequence + 1
                sequence = event.batch.sequence
                for change in event.batch.changes:
                    known |= set(split(change.stored))
                    known -= set(split(change.removed))

        after = stub.SubscribeKvEvents(pb.SubscribeKvEventsRequest())
        assert (await after.read()).begin.sequence == sequence
        assert set(split((await after.read()).snapshot.block_hashes)) == known
        assert len(known) == 8


def split(hashes: bytes) -> list[bytes]:
    return [hashes[i : i + 16] for i in range(0, len(hashes), 16)]
