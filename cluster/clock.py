"""Time, for what waits: the running event loop's own, or one that a test moves by hand.

Deciding code takes `now` as an argument. What must *wake up* takes a `Clock`, which is no more than the two methods of
an event loop that are about time.
"""

import asyncio
from collections.abc import Callable
from typing import Any, Protocol


class Timer(Protocol):
    """A callback that is due."""

    def cancel(self) -> None: ...


class Clock(Protocol):
    """`asyncio.AbstractEventLoop` is one."""

    def time(self) -> float:
        """Monotonic seconds."""
        ...

    def call_at(self, when: float, callback: Callable[..., Any], *args: Any) -> Timer: ...


async def sleep(clock: Clock, seconds: float) -> None:
    """Returns after so long by `clock`."""
    done = asyncio.get_running_loop().create_future()
    timer = clock.call_at(clock.time() + seconds, _finish, done)
    try:
        await done
    finally:
        timer.cancel()


def _finish(done: asyncio.Future[None]) -> None:
    if not done.done():
        done.set_result(None)
