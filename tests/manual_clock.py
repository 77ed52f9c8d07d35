"""A clock that stands still until a test moves it."""

import heapq
from collections.abc import Callable
from itertools import count
from typing import Any


class ManualTimer:
    def __init__(self, callback: Callable[[], None]) -> None:
        self.callback: Callable[[], None] | None = callback

    def cancel(self) -> None:
        self.callback = None


class ManualClock:
    """Implements `cluster.clock.Clock`."""

    def __init__(self) -> None:
        self._now = 1000.0
        self._timers: list[tuple[float, int, ManualTimer]] = []
        self._serial = count()

    def time(self) -> float:
        return self._now

    def call_at(self, when: float, callback: Callable[..., Any], *args: Any) -> ManualTimer:
        timer = ManualTimer(lambda: callback(*args))
        heapq.heappush(self._timers, (when, next(self._serial), timer))
        return timer

    @property
    def num_timers(self) -> int:
        return sum(timer.callback is not None for _, _, timer in self._timers)

    def advance(self, seconds: float) -> None:
        """Moves on, calling what falls due on the way, in order."""
        until = self._now + seconds
        while self._timers and self._timers[0][0] <= until:
            when, _, timer = heapq.heappop(self._timers)
            self._now = max(self._now, when)
            if timer.callback is not None:
                callback, timer.callback = timer.callback, None
                callback()
        self._now = until
