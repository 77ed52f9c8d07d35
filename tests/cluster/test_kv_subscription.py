"""Following a worker's KV events: the decisions in a table, then over a real stream with a clock moved by hand."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from cluster import wire
from cluster.backoff import Backoff
from cluster.channel import ChannelConfig, open_channel
from cluster.directory import Directory
from cluster.kv_subscription import KvSubscriber, KvSubscription, Resubscribe, SubscriptionState
from engine.kvcache.block_hash import BlockHash
from fake_worker import BLOCK_SIZE, FakeWorker
from manual_clock import ManualClock
from tandem.v1 import worker_pb2 as pb
from tandem.v1 import worker_pb2_grpc

A, B, C = (BlockHash(bytes([i]) * 16) for i in (1, 2, 3))


def begin(sequence: int = 5, **changes: object) -> pb.KvEvent:
    fields = {
        "instance_id": "d0-instance",
        "epoch": 1,
        "sequence": sequence,
        "block_size": BLOCK_SIZE,
        "fingerprint": b"fake-model",
    }
    return pb.KvEvent(begin=pb.Begin(**(fields | changes)))


def snapshot(*hashes: bytes) -> pb.KvEvent:
    return pb.KvEvent(snapshot=pb.Snapshot(block_hashes=b"".join(hashes)))


END = pb.KvEvent(snapshot_end=pb.SnapshotEnd())
CLEARED = pb.CacheChange(cleared=True)


def batch(sequence: int, *changes: pb.CacheChange, epoch: int = 1) -> pb.KvEvent:
    return pb.KvEvent(batch=pb.Batch(epoch=epoch, sequence=sequence, changes=changes))


def heartbeat(sequence: int) -> pb.KvEvent:
    return pb.KvEvent(heartbeat=pb.Heartbeat(epoch=1, sequence=sequence))


def stored(*hashes: bytes) -> pb.CacheChange:
    return pb.CacheChange(stored=b"".join(hashes))


def removed(*hashes: bytes) -> pb.CacheChange:
    return pb.CacheChange(removed=b"".join(hashes))


@pytest.fixture
def directory() -> Directory:
    return Directory()


@pytest.fixture
def subscription(directory: Directory) -> KvSubscription:
    worker = FakeWorker("d0", instance_id="d0-instance")
    return KvSubscription(wire.worker_info(worker.description, "d0:1"), directory, 100.0, silent_after_s=10.0)


def holders(directory: Directory) -> list[bool]:
    return [bool(directory.workers_of(h)) for h in (A, B, C)]


@pytest.mark.parametrize(
    ("events", "held"),
    [
        ([begin(), snapshot(A), snapshot(B), END], [True, True, False]),
        ([begin(), END, batch(6, stored(A)), batch(7, stored(B, C), removed(A))], [False, True, True]),
        ([begin(), snapshot(A, B), END, batch(6, CLEARED, stored(C), epoch=2)], [False, False, True]),
        ([begin(), snapshot(A), END, batch(6, removed(B, A), stored(C)), heartbeat(6)], [False, False, True]),
        ([begin(), snapshot(A), END, batch(5, removed(A)), batch(6, stored(B))], [True, True, False]),
    ],
    ids=["snapshot", "batches in order", "cleared", "removed unknown", "a batch that the snapshot contains"],
)  # fmt: skip
def test_events_that_follow_each_other_are_applied(
    subscription: KvSubscription, directory: Directory, events: list[pb.KvEvent], held: list[bool]
) -> None:
    for event in events:
        subscription.receive(event, 101.0)
    assert subscription.state is SubscriptionState.FOLLOWING
    assert holders(directory) == held
    subscription.stream_ended()
    subscription.stream_ended()
    assert holders(directory) == [False, False, False]


@pytest.mark.parametrize(
    ("events", "why"),
    [
        ([snapshot(A)], "snapshot does not belong into the state subscribing"),
        ([batch(6)], "batch does not belong into the state subscribing"),
        ([heartbeat(6)], "heartbeat does not belong into the state subscribing"),
        ([pb.KvEvent()], "None does not belong"),
        ([begin(instance_id="another")], "instance another answers"),
        ([begin(fingerprint=b"other")], "not those that it described"),
        ([begin(block_size=99)], "not those that it described"),
        ([begin(), begin()], "begin does not belong into the state snapshot"),
        ([begin(), batch(6)], "batch does not belong into the state snapshot"),
        ([begin(), END, END], "snapshot_end does not belong into the state following"),
        ([begin(), END, batch(7)], "batch 1/7 does not follow"),
        ([begin(), END, batch(6, epoch=2)], "batch 2/6 does not follow"),
        ([begin(), END, batch(6), heartbeat(7)], "heartbeat tells of batch 1/7"),
    ],
)
def test_events_that_do_not_follow_make_it_subscribe_anew(
    subscription: KvSubscription, events: list[pb.KvEvent], why: str
) -> None:
    for event in events[:-1]:
        subscription.receive(event, 101.0)
    with pytest.raises(Resubscribe, match=why):
        subscription.receive(events[-1], 101.0)


def test_hashes_that_are_cut_are_a_breach_of_the_protocol(subscription: KvSubscription) -> None:
    subscription.receive(begin(), 101.0)
    with pytest.raises(wire.WireError, match="15 bytes"):
        subscription.receive(snapshot(b"x" * 15), 101.0)


def test_every_event_puts_off_silence(subscription: KvSubscription) -> None:
    assert subscription.silent_at == 110.0
    subscription.receive(begin(), 104.0)
    assert subscription.silent_at == 114.0


# --- over a stream


class Following:
    """A subscriber that follows a fake worker."""

    def __init__(self, worker: FakeWorker) -> None:
        self.worker = worker
        self.clock = ManualClock()
        self.directory = Directory()
        info = wire.worker_info(worker.description, worker.address)
        self.subscriber = KvSubscriber(info, self.directory, self.clock, backoff=Backoff(first_s=0.5, max_s=4.0))

    async def until(self, *hashes: bytes) -> None:
        """Returns once the directory has exactly these blocks of the worker."""
        expected = [h in hashes for h in (A, B, C)]
        while holders(self.directory) != expected:
            await asyncio.sleep(0)

    async def until_backing_off(self, num_resubscriptions: int) -> None:
        while self.subscriber.subscription.num_resubscriptions < num_resubscriptions:
            await asyncio.sleep(0)


@asynccontextmanager
async def following(*held: bytes) -> AsyncIterator[Following]:
    worker = FakeWorker("d0")
    worker.held.extend(held)
    await worker.start()
    f = Following(worker)
    async with open_channel(worker.address, ChannelConfig()) as channel:
        running = asyncio.create_task(f.subscriber.run(worker_pb2_grpc.WorkerStub(channel)))
        try:
            await worker.subscribed.get()
            yield f
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            assert f.clock.num_timers == 0
            assert holders(f.directory) == [False, False, False]
            await worker.kill()


async def test_the_directory_follows_a_worker() -> None:
    async with following(A) as f:
        await f.until(A)
        f.worker.store(B, C)
        await f.until(A, B, C)
        f.worker.publish(removed(A), removed(b"?" * 16))
        await f.until(B, C)


async def test_a_lost_batch_leads_to_a_new_snapshot_after_a_back_off() -> None:
    async with following(A) as f:
        await f.until(A)
        f.worker.held.append(B)
        f.worker.sequence += 1  # the batch with B is lost
        f.worker.store(C)
        await f.until()  # nothing of it is believed
        await f.until_backing_off(1)
        f.clock.advance(0.4)
        assert f.worker.subscribed.empty()
        f.clock.advance(0.1)
        await f.worker.subscribed.get()
        await f.until(A, B, C)


async def test_back_offs_grow_until_a_stream_is_good_again() -> None:
    async with following(A) as f:
        await f.until(A)
        good = f.worker.instance_id
        f.worker.instance_id = "stranger"
        f.worker.send_event(None)
        for attempt, delay in enumerate([0.5, 1.0, 2.0, 4.0, 4.0], start=1):
            await f.until_backing_off(attempt)
            if attempt == 5:
                f.worker.instance_id = good
            f.clock.advance(delay)
            await f.worker.subscribed.get()
        await f.until(A)
        f.worker.send_event(None)
        await f.until_backing_off(6)
        f.clock.advance(0.5)
        await f.worker.subscribed.get()
        await f.until(A)


async def test_a_worker_without_events_is_shown_and_logged_within_ten_seconds_and_asked_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with following(A) as f:
        await f.until(A)
        f.clock.advance(9.9)
        assert not f.subscriber.is_silent
        with caplog.at_level(logging.WARNING, "cluster.kv_subscription"):
            f.clock.advance(0.1)
        assert f.subscriber.is_silent
        assert "no KV events of d0" in caplog.text
        await f.until()
        await f.until_backing_off(1)
        f.clock.advance(0.5)
        await f.worker.subscribed.get()
        await f.until(A)
        assert not f.subscriber.is_silent


async def test_a_worker_that_never_answers_is_asked_again_and_again() -> None:
    async with following(A) as f:
        await f.until(A)
        await f.worker.kill()
        await f.until_backing_off(1)
        f.clock.advance(0.5)
        await f.until_backing_off(2)
        assert not f.subscriber.is_silent
        f.clock.advance(10.0)
        assert f.subscriber.is_silent
