"""A gateway's session with a worker: one stream, the lease of all requests that came through it (PROTOCOL §2)."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from typing import Protocol

from tandem.v1 import worker_pb2 as pb

logger = logging.getLogger(__name__)

# A gateway that is this many messages behind does not read any more.
MAX_BACKLOG = 16_384


class Session:
    """What goes out on one stream, in order.

    Args:
        on_broken: called once, when the gateway is so far behind that it is left: the stream is to be ended.
    """

    def __init__(self, on_broken: Callable[[], object]) -> None:
        self._queue: asyncio.Queue[pb.SessionResponse | None] = asyncio.Queue()
        self._on_broken: Callable[[], object] | None = on_broken

    def send(self, response: pb.SessionResponse) -> None:
        """Queues a message; past the bound the stream is ended instead."""
        if self._on_broken is None:
            return
        if self._queue.qsize() >= MAX_BACKLOG:
            logger.warning("a gateway is more than %d messages behind: its session is ended", MAX_BACKLOG)
            on_broken, self._on_broken = self._on_broken, None
            on_broken()
            return
        self._queue.put_nowait(response)

    def refuse(self, request_id: str, code: int, message: str) -> None:
        """Ends a request with a status (google.rpc.Code)."""
        # Not its words, which may repeat what was asked.
        logger.info("refused with status %d", code, extra={"request_id": request_id})
        refused = pb.Refused(request_id=request_id, code=code, message=message)
        self.send(pb.SessionResponse(refused=refused))

    def close(self) -> None:
        """Ends the stream after what is queued."""
        self._queue.put_nowait(None)

    async def outgoing(self) -> AsyncIterator[pb.SessionResponse]:
        """The messages to write, until the session is closed."""
        while (response := await self._queue.get()) is not None:
            yield response


class SessionHandler(Protocol):
    """What a role does with what gateways ask; called on the loop, never blocking."""

    def submit(self, session: Session, submit: pb.Submit) -> None: ...

    def assign(self, session: Session, assign: pb.Assign) -> None: ...

    def abort_requests(self, session: Session, request_ids: list[str]) -> None: ...

    def session_ended(self, session: Session) -> None:
        """The stream is over, for whatever reason: its requests are to be aborted."""
        ...
