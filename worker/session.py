"""A gateway's session with a worker: one stream, the lease of all requests that came through it (PROTOCOL §2)."""

import asyncio
from collections.abc import AsyncIterator
from typing import Protocol

from tandem.v1 import worker_pb2 as pb

# A gateway that is this many messages behind does not read any more.
MAX_BACKLOG = 16_384


class SessionBroken(Exception):
    """The gateway does not read: the session is closed on it."""


class Session:
    """What goes out on one stream, in order."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[pb.SessionResponse | None] = asyncio.Queue()
        self._broken = False

    def send(self, response: pb.SessionResponse) -> None:
        """Queues a message; past the bound the stream is ended instead."""
        if self._broken:
            return
        if self._queue.qsize() >= MAX_BACKLOG:
            self._broken = True
            self._queue.put_nowait(None)
            return
        self._queue.put_nowait(response)

    def refuse(self, request_id: str, code: int, message: str) -> None:
        """Ends a request with a status (google.rpc.Code)."""
        refused = pb.Refused(request_id=request_id, code=code, message=message)
        self.send(pb.SessionResponse(refused=refused))

    def close(self) -> None:
        """Ends the stream after what is queued."""
        self._queue.put_nowait(None)

    async def outgoing(self) -> AsyncIterator[pb.SessionResponse]:
        """The messages to write, until the session is closed.

        Raises:
            SessionBroken: the gateway fell too far behind.
        """
        while (response := await self._queue.get()) is not None:
            if self._broken:
                break
            yield response
        if self._broken:
            raise SessionBroken(f"more than {MAX_BACKLOG} messages behind")


class SessionHandler(Protocol):
    """What a role does with what gateways ask; called on the loop, never blocking."""

    def submit(self, session: Session, submit: pb.Submit) -> None: ...

    def assign(self, session: Session, assign: pb.Assign) -> None: ...

    def abort_requests(self, session: Session, request_ids: list[str]) -> None: ...

    def session_ended(self, session: Session) -> None:
        """The stream is over, for whatever reason: its requests are to be aborted."""
        ...
