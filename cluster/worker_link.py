"""One worker's address, followed for as long as it is a member.

    CONNECTING ── described, admitted, session open ──> READY
        ^                                                 │
        └──────── back-off <── session ended, refused <───┘          close: CLOSED, from anywhere

Every connection starts from nothing: a new channel, `Describe` (a worker that was restarted at the same address is
another instance), a session, a subscription to its KV events. When the session ends, all of it does, and what was known
of the instance is forgotten; then it is tried again, until the link is closed.
"""

import asyncio
import logging
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

import grpc

from cluster import wire
from cluster.backoff import Backoff
from cluster.channel import ChannelConfig, describe_failure, open_channel
from cluster.clock import Clock, sleep
from cluster.directory import Directory
from cluster.errors import WorkerLost
from cluster.kv_subscription import SILENT_AFTER_S, KvSubscriber
from cluster.session import DEFAULT_MAX_BUFFERED, Session
from cluster.worker_info import WorkerInfo, WorkerLoad
from tandem.v1 import worker_pb2 as pb
from tandem.v1 import worker_pb2_grpc

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LinkConfig:
    """Times (seconds) and bounds of a connection to a worker."""

    channel: ChannelConfig = field(default_factory=ChannelConfig)
    describe_timeout_s: float = 5.0
    first_retry_s: float = 0.1
    max_retry_s: float = 1.0  # low: it costs next to nothing, and a restarted worker is back at once
    silent_after_s: float = SILENT_AFTER_S
    max_buffered: int = DEFAULT_MAX_BUFFERED  # steps that a client may be behind


class LinkState(Enum):
    CONNECTING = "connecting"
    READY = "ready"
    CLOSED = "closed"


class WorkerMismatch(ValueError):
    """A worker that does not belong to this cluster: another model, another block size, a name that is taken."""


class LinkListener(Protocol):
    """Who is told what becomes of a worker. All calls are made on the loop."""

    @property
    def expects_losses(self) -> bool:
        """Whether the loss of a worker is no news: everything is ending."""
        ...

    def admit(self, link: "WorkerLink", info: WorkerInfo) -> None:
        """Raises `WorkerMismatch` to refuse the worker."""
        ...

    def ready(self, link: "WorkerLink") -> None: ...

    def load(self, link: "WorkerLink", load: WorkerLoad) -> None: ...

    def lost(self, link: "WorkerLink") -> None:
        """Called for every `ready`, before the requests that were there fail."""
        ...

    def failed(self, link: "WorkerLink") -> None:
        """A connection could not be made, or has ended; `link.last_error` says why."""
        ...


class WorkerLink:
    """The connection to one worker, and the next one when that breaks."""

    def __init__(
        self, address: str, listener: LinkListener, directory: Directory, config: LinkConfig, clock: Clock
    ) -> None:
        self.address = address
        self.state = LinkState.CONNECTING
        self.info: WorkerInfo | None = None  # of the last instance that was admitted
        self.session: Session | None = None  # None unless READY
        self.last_error: str | None = None
        self.mismatch: WorkerMismatch | None = None  # why it was refused, the last time it was
        self._listener = listener
        self._directory = directory
        self._config = config
        self._clock = clock
        self._subscriber: KvSubscriber | None = None
        self._backoff = Backoff(config.first_retry_s, config.max_retry_s)
        self._task: asyncio.Task[None] | None = None

    @property
    def kv_events_silent(self) -> bool:
        """Whether the worker's KV events are missing."""
        return self._subscriber is None or self._subscriber.is_silent

    def start(self) -> None:
        """Begins to connect, in the background."""
        assert self._task is None, f"the link to {self.address} is started twice"
        self._task = asyncio.create_task(self._run(), name=f"link to {self.address}")
        self._task.add_done_callback(self._report_crash)

    async def close(self) -> None:
        """Lets go of the worker; its requests fail. Idempotent."""
        self.state = LinkState.CLOSED
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            try:
                await self._connect()
            except grpc.aio.AioRpcError as exc:
                error = f"{self.address} cannot be reached: {describe_failure(exc)}"
            except WorkerLost as exc:
                error = exc.message
            except WorkerMismatch as exc:
                self.mismatch = exc
                error = str(exc)
            except wire.WireError as exc:
                error = f"{self.address} broke the protocol: {exc}"
            if error != self.last_error:  # said once, not at every retry
                logger.log(logging.INFO if self._listener.expects_losses else logging.WARNING, "%s", error)
            self.last_error = error
            self._listener.failed(self)
            await sleep(self._clock, self._backoff.next_delay())

    async def _connect(self) -> None:
        """One connection, from its channel to its end, which is always an exception."""
        async with open_channel(self.address, self._config.channel) as channel:
            stub = worker_pb2_grpc.WorkerStub(channel)  # type: ignore[no-untyped-call]
            description = await stub.Describe(pb.DescribeRequest(), timeout=self._config.describe_timeout_s)
            info = wire.worker_info(description, self.address)
            self._listener.admit(self, info)
            self.info = info
            self._subscriber = KvSubscriber(
                info, self._directory, self._clock, silent_after_s=self._config.silent_after_s
            )
            session = Session(info, self, max_buffered=self._config.max_buffered)
            following = asyncio.create_task(self._subscriber.run(stub), name=f"KV events of {info.worker_id}")
            serving = asyncio.create_task(session.run(stub), name=f"session with {info.worker_id}")
            try:
                # The subscriber ends by itself only if it crashes; that must not go unnoticed.
                done, _ = await asyncio.wait({serving, following}, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
            finally:
                serving.cancel()
                following.cancel()
                await asyncio.gather(serving, following, return_exceptions=True)
                self._subscriber = None

    def _report_crash(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (exc := task.exception()) is not None:
            context = {"message": f"{task.get_name()} crashed", "exception": exc, "task": task}
            asyncio.get_running_loop().call_exception_handler(context)

    # --- told by the session

    def session_opened(self, session: Session) -> None:
        self.session = session
        self.state = LinkState.READY
        self.last_error = None
        self.mismatch = None
        self._backoff.succeeded()
        logger.info("%s worker %s at %s is ready", session.worker.role.value, session.worker.worker_id, self.address)
        self._listener.ready(self)

    def session_load(self, session: Session, load: WorkerLoad) -> None:
        self._listener.load(self, load)

    def session_closed(self, session: Session) -> None:
        self.session = None
        if self.state is LinkState.READY:
            self.state = LinkState.CONNECTING
        self._directory.forget(session.worker.instance_id)
        self._listener.lost(self)
