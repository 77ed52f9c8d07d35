"""How busy a worker is, told to its gateways: on change, at most every 50 ms."""

import asyncio
from collections.abc import Callable

from tandem.v1 import worker_pb2 as pb
from worker.session import Session

MIN_INTERVAL_S = 0.05


class LoadReporter:
    """Sends `Load` to all sessions.

    Args:
        measure: makes the message of now.
    """

    def __init__(self, measure: Callable[[], pb.Load]) -> None:
        self._measure = measure
        self._sessions: set[Session] = set()
        self._last = pb.Load()
        self._timer: asyncio.TimerHandle | None = None

    def add(self, session: Session) -> None:
        """Begins to report to `session`, with the load of now."""
        self._sessions.add(session)
        session.send(pb.SessionResponse(load=self._measure()))

    def remove(self, session: Session) -> None:
        self._sessions.discard(session)

    def changed(self) -> None:
        """Something may have changed: it is looked at soon, together with what changes until then."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(MIN_INTERVAL_S, self._report)

    def close(self) -> None:
        """Stops reporting; idempotent."""
        if self._timer is not None:
            self._timer.cancel()

    def _report(self) -> None:
        self._timer = None
        load = self._measure()
        if load == self._last:
            return
        self._last = load
        for session in self._sessions:
            session.send(pb.SessionResponse(load=load))
