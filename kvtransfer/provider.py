"""A worker as holder: every hand-off that it gives out.

`Provider` is what `service` (gRPC) and `loopback` serve; a `Holding` is one hand-off: its `Holder` machine, the stream
to the consumer, and the port to the engine.
"""

import asyncio
from collections.abc import Callable
from typing import Protocol

from kvtransfer.counters import HolderCounters
from kvtransfer.driver import Driver
from kvtransfer.errors import Code, HandoffRefused
from kvtransfer.events import (
    AbortCompute,
    CloseStream,
    Failed,
    HolderAction,
    HolderEvent,
    PinCached,
    Send,
    StartPrefill,
    StreamEnded,
    Unpin,
)
from kvtransfer.holder import Holder
from kvtransfer.messages import Accepted, Complete, Confirmed, HandoffTimes, HolderMessage, Open, Pulled, Ready
from kvtransfer.ports import HolderPool, HolderPort
from kvtransfer.staging import StagedPort


class HolderStream(Protocol):
    """The way to one consumer. Neither method blocks; what they are given leaves in their order."""

    def send(self, message: HolderMessage) -> None: ...

    def close(self, code: Code, message: str) -> None: ...


class Holding:
    """One hand-off that this worker gives out."""

    def __init__(
        self, holder: Holder, port: HolderPort, stream: HolderStream, ended: Callable[["Holding"], None]
    ) -> None:
        self.holder = holder
        self._port = port
        self._stream = stream
        self._ended: Callable[[Holding], None] | None = ended
        self._driver: Driver[HolderEvent, HolderAction] = Driver(holder, self._act)

    def start(self) -> None:
        self._driver.start()
        self._report_end()

    def post(self, event: HolderEvent) -> None:
        """From the stream, or from the worker. Also when all is over: pins that come late are given back."""
        self._driver.post(event)
        self._report_end()

    def pulled(self, message: Pulled) -> None:
        self.post(message)

    def stream_ended(self, code: Code, message: str) -> None:
        """The stream is gone; idempotent, and a no-op after the holder has closed it."""
        self.post(StreamEnded(code, message))

    def _act(self, action: HolderAction) -> None:
        match action:
            case Send():
                assert isinstance(action.message, Accepted | Ready | Complete | Confirmed), action
                self._stream.send(action.message)
            case CloseStream():
                self._stream.close(action.code, action.message)
            case StartPrefill():
                self._ask(self._port.start_prefill)
            case PinCached():
                self._ask(self._port.pin_cached)
            case AbortCompute():
                self._port.abort(self.holder.open.handoff_id)
            case Unpin():
                self._port.unpin(action.block_ids)

    def _ask(self, ask: Callable[[Open, Callable[[HolderEvent], None]], None]) -> None:
        try:
            ask(self.holder.open, self.post)
        except HandoffRefused as error:
            self.post(Failed(error.code, error.message, refused=True))

    def _report_end(self) -> None:
        if self.holder.is_over and self._ended is not None:
            ended, self._ended = self._ended, None
            ended(self)


class Provider:
    """Gives out blocks of one pool."""

    def __init__(
        self,
        pool: HolderPool,
        port: HolderPort,
        times: HandoffTimes | None = None,
        *,
        staged: StagedPort | None = None,
    ) -> None:
        """`staged`: copies of the same pool in host memory, for consumers that cannot map it; None: there are none."""
        self.counters = HolderCounters()
        self.times = times or HandoffTimes()
        self._pool = pool
        self._port = port
        self._staged = staged
        self._holdings: dict[str, Holding] = {}
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def num_active(self) -> int:
        """Hand-offs under way."""
        return len(self._holdings)

    async def wait_idle(self) -> None:
        """Returns when no hand-off is under way."""
        await self._idle.wait()

    def open(self, open: Open, stream: HolderStream) -> Holding:
        """Begins a hand-off; what comes of it is said on the stream."""
        pool, port = self._pool, self._port
        if open.staged and self._staged is not None:
            pool, port = self._staged.pool, self._staged
        holder = Holder(
            open,
            pool.handle,
            block_size=pool.layout.block_size,
            fingerprint=pool.layout.fingerprint,
            num_groups=pool.num_groups,
            times=self.times,
        )
        holding = Holding(holder, port, stream, self._ended)
        self.counters.opened += 1
        if open.handoff_id in self._holdings:
            holding.post(Failed(Code.ALREADY_EXISTS, f"hand-off {open.handoff_id} is under way", refused=True))
            return holding
        if open.staged and self._staged is None:
            message = f"this worker hands out no copies in host memory: its pool is of kind {pool.handle.kind!r}"
            holding.post(Failed(Code.FAILED_PRECONDITION, message, refused=True))
            return holding
        self.counters.staged += open.staged
        self._holdings[open.handoff_id] = holding
        self._idle.clear()
        holding.start()
        return holding

    def close(self) -> None:
        """Ends every hand-off, saying so to its consumer. Idempotent."""
        for holding in list(self._holdings.values()):
            holding.post(Failed(Code.UNAVAILABLE, "the worker is shutting down"))

    def _ended(self, holding: Holding) -> None:
        holder = holding.holder
        assert holder.end is not None, holder.state
        self.counters.ends[holder.end] += 1
        self.counters.stale_blocks += holder.num_stale_blocks
        if self._holdings.get(holder.open.handoff_id) is holding:
            del self._holdings[holder.open.handoff_id]
        if not self._holdings:
            self._idle.set()
