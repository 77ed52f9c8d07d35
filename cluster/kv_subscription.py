"""Following one worker's KV events into the directory, so that the router knows what it caches.

    SUBSCRIBING ── Begin ──> SNAPSHOT ── SnapshotEnd ──> FOLLOWING
         ^                       │                           │
         └── gap, unknown instance, silence, stream ended <──┘     (after a back-off; the worker is forgotten)

`KvSubscription` decides, event by event, with the clock passed in; `KvSubscriber` moves the stream's messages into it
and opens the next stream when one has become useless. A worker that says nothing for `silent_after_s` is logged and
shown as silent until it speaks: meanwhile the router is blind to its cache, and works all the same.
"""

import asyncio
import logging
from collections.abc import Callable
from enum import Enum

import grpc

from cluster import wire
from cluster.backoff import Backoff
from cluster.channel import describe_failure
from cluster.clock import Clock, Timer, sleep
from cluster.directory import Applied, Directory
from cluster.worker_info import WorkerInfo
from tandem.v1 import worker_pb2 as pb
from tandem.v1 import worker_pb2_grpc

logger = logging.getLogger(__name__)

SILENT_AFTER_S = 10.0


class SubscriptionState(Enum):
    SUBSCRIBING = "subscribing"
    SNAPSHOT = "snapshot"
    FOLLOWING = "following"


class Resubscribe(Exception):
    """The stream is of no more use; the message says why."""


class KvSubscription:
    """What is believed of one worker's cache, and whether its stream can still be believed."""

    def __init__(self, worker: WorkerInfo, directory: Directory, now: float, silent_after_s: float) -> None:
        self.worker = worker
        self.state = SubscriptionState.SUBSCRIBING
        self.num_resubscriptions = 0
        self._directory = directory
        self._silent_after_s = silent_after_s
        self._heard_at = now

    @property
    def silent_at(self) -> float:
        """When the worker counts as silent if it says nothing until then."""
        return self._heard_at + self._silent_after_s

    def receive(self, event: pb.KvEvent, now: float) -> None:
        """Applies one message of the stream.

        Raises:
            Resubscribe: the stream is of no more use.
        """
        self._heard_at = now
        instance_id = self.worker.instance_id
        kind = event.WhichOneof("event")
        match kind, self.state:
            case "begin", SubscriptionState.SUBSCRIBING:
                begin = event.begin
                if begin.instance_id != instance_id:
                    raise Resubscribe(f"instance {begin.instance_id} answers, not {instance_id}")
                if begin.block_size != self.worker.block_size or begin.fingerprint != self.worker.fingerprint:
                    raise Resubscribe("its blocks are not those that it described")
                self._directory.begin(instance_id, begin.epoch, begin.sequence)
                self.state = SubscriptionState.SNAPSHOT
            case "snapshot", SubscriptionState.SNAPSHOT:
                self._directory.add_snapshot(instance_id, wire.block_hashes(event.snapshot.block_hashes))
            case "snapshot_end", SubscriptionState.SNAPSHOT:
                self.state = SubscriptionState.FOLLOWING
            case "batch", SubscriptionState.FOLLOWING:
                batch = event.batch
                applied = self._directory.apply(instance_id, batch.epoch, batch.sequence, wire.kv_events(batch))
                if applied is Applied.GAP:
                    raise Resubscribe(f"batch {batch.epoch}/{batch.sequence} does not follow the last one")
            case "heartbeat", SubscriptionState.FOLLOWING:
                beat = event.heartbeat
                if self._directory.heartbeat(instance_id, beat.epoch, beat.sequence) is Applied.GAP:
                    raise Resubscribe(f"its heartbeat tells of batch {beat.epoch}/{beat.sequence}, which never came")
            case _:
                raise Resubscribe(f"{kind} does not belong into the state {self.state.value}")

    def stream_ended(self) -> None:
        """The stream is over, for whatever reason: nothing of it is believed any more. Idempotent."""
        self._directory.forget(self.worker.instance_id)
        self.state = SubscriptionState.SUBSCRIBING


class KvSubscriber:
    """Keeps a subscription alive over as many streams as it takes; `run` is its life."""

    def __init__(
        self,
        worker: WorkerInfo,
        directory: Directory,
        clock: Clock,
        *,
        silent_after_s: float = SILENT_AFTER_S,
        backoff: Backoff | None = None,
    ) -> None:
        self.subscription = KvSubscription(worker, directory, clock.time(), silent_after_s)
        self.is_silent = False
        self._clock = clock
        self._silent_after_s = silent_after_s
        self._backoff = backoff or Backoff()
        self._silence: asyncio.Future[None] | None = None  # of the stream that is being read

    async def run(self, stub: worker_pb2_grpc.WorkerStub) -> None:
        """Follows until cancelled."""
        watch = _Watch(self._clock, self._check_silence)
        watch.at(self.subscription.silent_at)
        try:
            while True:
                reason = await self._follow(stub)
                self.subscription.stream_ended()
                self.subscription.num_resubscriptions += 1
                delay = self._backoff.next_delay()
                logger.info("KV events of %s: %s; again in %.1f s", self._name, reason, delay)
                await sleep(self._clock, delay)
        finally:
            watch.cancel()
            self.subscription.stream_ended()

    @property
    def _name(self) -> str:
        return f"{self.subscription.worker.worker_id} at {self.subscription.worker.address}"

    async def _follow(self, stub: worker_pb2_grpc.WorkerStub) -> str:
        """Reads one stream to its end, and says why that was."""
        silence = self._silence = asyncio.get_running_loop().create_future()
        reader = asyncio.create_task(self._read(stub))
        try:
            await asyncio.wait({reader, silence}, return_when=asyncio.FIRST_COMPLETED)
            return reader.result() if reader.done() else f"silent for {self._silent_after_s:g} s"
        finally:
            self._silence = None
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)

    async def _read(self, stub: worker_pb2_grpc.WorkerStub) -> str:
        call = stub.SubscribeKvEvents(pb.SubscribeKvEventsRequest())
        try:
            async for event in call:
                self.subscription.receive(event, self._clock.time())
                if self.is_silent:
                    self.is_silent = False
                    logger.info("KV events of %s are back", self._name)
                if self.subscription.state is SubscriptionState.FOLLOWING:
                    self._backoff.succeeded()
            return "it ended the stream"
        except (Resubscribe, wire.WireError) as exc:
            return str(exc)
        except grpc.aio.AioRpcError as exc:
            return describe_failure(exc)
        finally:
            call.cancel()

    def _check_silence(self) -> float:
        """Called when the worker might be silent; says when to look again."""
        now = self._clock.time()
        if now < self.subscription.silent_at:
            return self.subscription.silent_at
        if not self.is_silent:
            self.is_silent = True
            logger.warning(
                "no KV events of %s for %g s: the router is blind to its cache", self._name, self._silent_after_s
            )
        if self._silence is not None and not self._silence.done():
            self._silence.set_result(None)
        return now + self._silent_after_s


class _Watch:
    """Calls back at a time, and again whenever the callback says, until cancelled."""

    def __init__(self, clock: Clock, check: Callable[[], float]) -> None:
        self._clock = clock
        self._check = check
        self._timer: Timer | None = None

    def at(self, when: float) -> None:
        self._timer = self._clock.call_at(when, self._due)

    def _due(self) -> None:
        self.at(self._check())

    def cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
