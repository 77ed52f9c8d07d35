"""A worker as consumer: every hand-off that it takes in.

`Puller` is what a worker asks for blocks; a `Pulling` is one hand-off: its `Consumer` machine, the stream to the
holder, the copies, and the port to the engine. How a holder is reached is a `Transport`: gRPC (`client`), or
`loopback`.

A holder's pool that cannot be mapped here fails one hand-off, once for each start of that holder; the next ones ask for
copies in host memory (`Open.staged`), and the port is told that this is no reason to leave the holder.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from engine.memory import KVLayout
from kvtransfer.consumer import Consumer
from kvtransfer.copier import Copier
from kvtransfer.counters import ConsumerCounters
from kvtransfer.driver import Driver
from kvtransfer.errors import Code, PoolUnreachable
from kvtransfer.events import (
    AbortRequested,
    CloseStream,
    Commit,
    CommitBlocks,
    ConsumerAction,
    ConsumerEvent,
    Copy,
    CopyEnded,
    DeliverFirstTokens,
    End,
    LoseHolder,
    Send,
    StreamEnded,
    TransferStats,
)
from kvtransfer.exported import ExportedMemory
from kvtransfer.mapping import PeerPools
from kvtransfer.messages import Accepted, ConsumerMessage, HandoffTimes, HolderMessage, Open, Pulled
from kvtransfer.ports import ConsumerPort
from kvtransfer.unmappable import STAGED_KINDS, UnmappablePools


class ConsumerStream(Protocol):
    """The way to one holder. Neither method blocks."""

    def send(self, message: ConsumerMessage) -> None: ...

    def close(self) -> None:
        """Cancels it, unless it has ended. Idempotent."""
        ...


class Transport(Protocol):
    """How holders are reached."""

    def connect(
        self, address: str, timeout_s: float, listener: Callable[[HolderMessage | StreamEnded], None]
    ) -> ConsumerStream:
        """A new stream. The listener hears what the holder says, never before this returns, and `StreamEnded` last."""
        ...

    async def close(self) -> None:
        """Ends what is left. Idempotent."""
        ...


class Pulling:
    """One hand-off that this worker takes in."""

    def __init__(self, consumer: Consumer, address: str, puller: "Puller") -> None:
        self.consumer = consumer
        self.address = address
        self._puller = puller
        self._is_aborted = False
        self._is_unmappable = False
        self._driver: Driver[ConsumerEvent, ConsumerAction] = Driver(consumer, self._act)
        self.post = self._driver.post
        self._stream = puller.transport.connect(address, consumer.open.timeout_s, self._heard)

    def start(self) -> None:
        self._driver.start()

    def abort(self) -> None:
        """The port hears `ended` and nothing else of its end, even if another end was on the way."""
        self._is_aborted = True
        self.post(AbortRequested())

    def _heard(self, event: HolderMessage | StreamEnded) -> None:
        puller = self._puller
        match event:
            case StreamEnded(code=Code.UNAVAILABLE):
                # If it lives after all, it is mapped again.
                puller.pools.forget(self.address)
                puller.unmappable.forget(self.address)
            case StreamEnded(code=Code.FAILED_PRECONDITION) if self.consumer.open.staged:
                # Perhaps it was another instance's pool: of this one's we know nothing.
                puller.unmappable.forget(self.address)
            case Accepted():
                puller.unmappable.met(self.address, event.pool.instance_id)
        self.post(event)

    def _act(self, action: ConsumerAction) -> None:
        request_id = self.consumer.open.request_id
        port = self._puller.port
        match action:
            case Send():
                assert isinstance(action.message, Open | Pulled), action
                self._stream.send(action.message)
            case CloseStream():
                self._stream.close()
            case Copy():
                self._copy(action)
            case DeliverFirstTokens():
                port.first_tokens(request_id, action.complete)
            case CommitBlocks():
                port.commit_blocks(request_id, action.num_blocks)
            case Commit() | LoseHolder() | End():
                self._end(action)

    def _end(self, action: Commit | LoseHolder | End) -> None:
        port, counters = self._puller.port, self._puller.counters
        request_id = self.consumer.open.request_id
        self._puller.ended(self)
        if isinstance(action, End) or self._is_aborted:
            counters.aborted += 1
            port.ended(request_id)
        elif isinstance(action, Commit):
            counters.committed += 1
            counters.stale_blocks += action.result.num_stale_blocks
            port.committed(request_id, action.result)
        else:
            counters.lost[action.lost.code] += 1
            port.holder_lost(request_id, replace(action.lost, is_unmappable=self._is_unmappable))

    def _copy(self, copy: Copy) -> None:
        try:
            pool = self._puller.pools.get(self.address, copy.pool)
        except PoolUnreachable as error:
            if copy.pool.kind in STAGED_KINDS:
                self._is_unmappable = True
                self._puller.counters.unmappable_pools += self._puller.unmappable.found(self.address, copy.pool, error)
            self.post(CopyEnded(TransferStats(), error))
            return
        self._puller.copier.copy(pool, copy.source_ids, copy.target_ids, copy.fence, self.post)


class Puller:
    """Takes blocks into one pool."""

    def __init__(
        self,
        memory: ExportedMemory,
        layout: KVLayout,
        port: ConsumerPort,
        transport: Transport,
        *,
        times: HandoffTimes | None = None,
        max_bytes_per_copy: int | None = None,
    ) -> None:
        """`memory`: the worker's own pool. `max_bytes_per_copy`: None: what suits that pool."""
        self.counters = ConsumerCounters()
        self.port = port
        self.transport = transport
        self.pools = PeerPools()
        self.unmappable = UnmappablePools()
        copies = memory.copies(layout)
        self.copier = Copier(copies)
        self._layout = layout
        self._times = times or HandoffTimes()
        self._max_bytes_per_copy = max_bytes_per_copy or copies.max_bytes_per_copy
        self._pullings: dict[str, Pulling] = {}  # by request
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def num_active(self) -> int:
        """Hand-offs under way."""
        return len(self._pullings)

    async def wait_idle(self) -> None:
        """Returns when no hand-off is under way."""
        await self._idle.wait()

    def pull(
        self,
        address: str,
        open: Open,
        block_tables: Sequence[Sequence[int]],
        *,
        first_tokens_delivered: bool = False,
    ) -> None:
        """Begins a hand-off from the holder at `address` into the request's own blocks (one table a KV cache group).

        The port hears what comes of it. `first_tokens_delivered`: by an earlier hand-off of the same request. It is
        staged if that holder's pool is known to be unmappable.

        Raises:
            ValueError: a hand-off of this request is under way, or the tables are too short.
        """
        if open.request_id in self._pullings:
            raise ValueError(f"a hand-off of request {open.request_id} is under way")
        if self.unmappable.has(address):
            open = replace(open, staged=True)
        consumer = Consumer(
            open,
            block_tables,
            self._layout,
            times=self._times,
            first_tokens_delivered=first_tokens_delivered,
            max_bytes_per_copy=self._max_bytes_per_copy,
        )
        pulling = Pulling(consumer, address, self)
        self.counters.opened += 1
        self.counters.staged += open.staged
        self._pullings[open.request_id] = pulling
        self._idle.clear()
        pulling.start()

    def abort(self, request_id: str) -> bool:
        """Ends a request's hand-off. Whether there is one: if so, the port's `ended` is called when no copy is in
        flight any more (perhaps before this returns); if not, the request's blocks are free to go. Idempotent."""
        pulling = self._pullings.get(request_id)
        if pulling is None:
            return False
        pulling.abort()
        return True

    async def close(self) -> None:
        """Aborts all, waits for the copies in flight, and lets go of peers' pools. Idempotent."""
        for request_id in list(self._pullings):
            self.abort(request_id)
        await self.wait_idle()
        self.copier.close()
        self.pools.close()
        await self.transport.close()

    def ended(self, pulling: Pulling) -> None:
        """Called by a hand-off before it reports its end, so that the port may begin the next one at once."""
        del self._pullings[pulling.consumer.open.request_id]
        if not self._pullings:
            self._idle.set()
