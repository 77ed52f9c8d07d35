"""Ending politely: no new work is taken, what is in flight ends."""

import asyncio


class Drain:
    """Counts what is in flight (requests, hand-offs), and knows whether more is taken."""

    def __init__(self) -> None:
        self.draining = False
        self._in_flight = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def enter(self) -> None:
        """One more is in flight."""
        self._in_flight += 1
        self._idle.clear()

    def leave(self) -> None:
        """One has ended."""
        assert self._in_flight > 0, "left more often than entered"
        self._in_flight -= 1
        if not self._in_flight:
            self._idle.set()

    def begin(self) -> None:
        """From now on nothing new is taken; idempotent."""
        self.draining = True

    async def finished(self, timeout_s: float) -> bool:
        """Waits until nothing is in flight, but not longer than that; whether nothing is."""
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except TimeoutError:
            return False
        return True
