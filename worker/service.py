"""The `Worker` service: gRPC moves the messages, others decide."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from itertools import islice
from typing import Any

import grpc

from engine.kvcache.block_hash import BlockHash
from engine.kvcache.events import BlocksRemoved, BlocksStored, CacheCleared, KVEvent
from tandem.v1 import worker_pb2 as pb
from tandem.v1 import worker_pb2_grpc
from worker import session as worker_session
from worker.drain import Drain
from worker.kv_events import KvEventPublisher, SubscriberTooSlow
from worker.load import LoadReporter
from worker.session import SessionHandler

logger = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]

HEARTBEAT_S = 1.0
SNAPSHOT_HASHES = 65_536  # a message: 1 MiB


class WorkerService(worker_pb2_grpc.WorkerServicer):
    """Answers gateways.

    Args:
        drain_timeout_s: how long a caller of `Drain` waits at most; what runs by then goes on.
        not_serving: called when draining begins, for the health service to tell.
    """

    def __init__(
        self,
        description: pb.DescribeResponse,
        events: KvEventPublisher,
        handler: SessionHandler,
        load: LoadReporter,
        drain: Drain,
        drain_timeout_s: float,
        not_serving: Callable[[], Awaitable[None]],
    ) -> None:
        self._description = description
        self._events = events
        self._handler = handler
        self._load = load
        self._drain = drain
        self._drain_timeout_s = drain_timeout_s
        self._not_serving = not_serving

    async def Describe(self, request: pb.DescribeRequest, context: Context) -> pb.DescribeResponse:
        return self._description

    async def Session(
        self, requests: AsyncIterator[pb.SessionRequest], context: Context
    ) -> AsyncIterator[pb.SessionResponse]:
        # A stream whose gateway does not read hangs in a write: only cancelling it ends it.
        task = asyncio.current_task()
        assert task is not None
        session = worker_session.Session(on_broken=task.cancel)
        self._load.add(session)
        reader = asyncio.create_task(self._read(session, requests))
        try:
            async for response in session.outgoing():
                yield response
            await reader  # it has ended, or failed: then the stream fails as well
        finally:
            # Reached on every end: half-close by the gateway, its death, cancellation, our own stop.
            reader.cancel()
            self._load.remove(session)
            self._handler.session_ended(session)

    async def _read(self, session: worker_session.Session, requests: AsyncIterator[pb.SessionRequest]) -> None:
        try:
            async for request in requests:
                match request.WhichOneof("message"):
                    case "submit":
                        logger.debug("submitted", extra={"request_id": request.submit.request_id})
                        self._handler.submit(session, request.submit)
                    case "assign":
                        self._handler.assign(session, request.assign)
                    case "abort":
                        self._handler.abort_requests(session, list(request.abort.request_ids))
        finally:
            session.close()

    async def SubscribeKvEvents(
        self, request: pb.SubscribeKvEventsRequest, context: Context
    ) -> AsyncIterator[pb.KvEvent]:
        subscription = self._events.subscribe()
        try:
            yield pb.KvEvent(
                begin=pb.Begin(
                    instance_id=self._description.instance_id,
                    epoch=subscription.epoch,
                    sequence=subscription.sequence,
                    block_size=self._description.block_size,
                    fingerprint=self._description.fingerprint,
                    num_blocks=self._description.num_blocks,
                )
            )
            hashes = iter(subscription.snapshot)
            while part := b"".join(islice(hashes, SNAPSHOT_HASHES)):
                yield pb.KvEvent(snapshot=pb.Snapshot(block_hashes=part))
            yield pb.KvEvent(snapshot_end=pb.SnapshotEnd())
            while True:
                batch = await subscription.next(timeout=HEARTBEAT_S)
                if batch is None:
                    heartbeat = pb.Heartbeat(epoch=subscription.epoch, sequence=subscription.sequence)
                    yield pb.KvEvent(heartbeat=heartbeat)
                else:
                    changes = [_change(event) for event in batch.events]
                    yield pb.KvEvent(batch=pb.Batch(epoch=batch.epoch, sequence=batch.sequence, changes=changes))
        except SubscriberTooSlow as exc:
            await context.abort(grpc.StatusCode.OUT_OF_RANGE, str(exc))
        finally:
            self._events.unsubscribe(subscription)

    async def Drain(self, request: pb.DrainRequest, context: Context) -> pb.DrainResponse:
        self._drain.begin()
        self._load.changed()
        await self._not_serving()
        if not await self._drain.finished(self._drain_timeout_s):
            await context.abort(
                grpc.StatusCode.DEADLINE_EXCEEDED, f"requests are still in flight after {self._drain_timeout_s:g} s"
            )
        return pb.DrainResponse()


def _change(event: KVEvent) -> pb.CacheChange:
    match event:
        case BlocksStored(hashes):
            return pb.CacheChange(stored=_joined(hashes))
        case BlocksRemoved(hashes):
            return pb.CacheChange(removed=_joined(hashes))
        case CacheCleared():
            return pb.CacheChange(cleared=True)


def _joined(hashes: tuple[BlockHash, ...]) -> bytes:
    return b"".join(hashes)
