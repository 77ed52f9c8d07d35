"""The thread that owns an engine: commands in, step results out.

An engine belongs to one thread. Everyone else (the asyncio loop with its gRPC handlers, mostly) posts functions,
which run between two steps, in order. A step's result goes to `on_step`, on the loop.

At the end the two must fall silent together: what the last steps brought is still on its way to the loop, and may be
answered by commands (pins to give back, requests to abort). So the thread first stops stepping, and goes on taking
commands until a round to the loop and back has brought no new one.
"""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable
from enum import Enum

from engine.engine import Engine
from engine.outputs import StepResult
from engine.stats import EngineStats


class _Phase(Enum):
    STEPPING = "stepping"
    SETTLING = "settling"  # commands only
    ENDING = "ending"


class EngineThread:
    """Runs `engine` in a thread of its own from `start` to `stop`.

    Args:
        engine: nobody else may touch it between `start` and `stop`.
        on_step: called on the loop that `start` was called on, with what a step brought and the stats after it, in
        order.
        on_failure: called on that loop, once, if the engine raised; the thread has ended then.
    """

    def __init__(
        self,
        engine: Engine,
        on_step: Callable[[StepResult, EngineStats], None],
        on_failure: Callable[[BaseException], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self.stats = engine.stats()  # after the last step; anybody may look
        self._on_step = on_step
        self._on_failure = on_failure
        self._clock = clock
        self._inbox: deque[Callable[[Engine], None]] = deque()
        self._wake = threading.Condition()
        self._num_posted = 0
        self._phase = _Phase.STEPPING
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ended = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Begins to step; call it on the loop that shall hear of the steps."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def post(self, command: Callable[[Engine], None]) -> None:
        """Has `command` run between two steps. It must not raise: that counts as the engine's failure."""
        with self._wake:
            self._inbox.append(command)
            self._num_posted += 1
            self._wake.notify()

    async def stop(self) -> None:
        """Runs what was posted before, and what comes of it, then ends the thread; idempotent."""
        if self._thread.ident is None:
            return
        self._enter(_Phase.SETTLING)
        while not self._ended.is_set():
            posted_before = self._num_posted
            await self._round_trip()
            if self._num_posted == posted_before + 1:  # the round trip's own
                break
        self._enter(_Phase.ENDING)
        await asyncio.to_thread(self._thread.join)

    def _enter(self, phase: "_Phase") -> None:
        with self._wake:
            self._phase = phase
            self._wake.notify()

    async def _round_trip(self) -> None:
        """Returns when all commands so far have run and the loop has heard all they reported, or the thread is dead."""
        back = asyncio.Event()
        self.post(lambda engine: self.report(back.set))
        waiting = [asyncio.ensure_future(event.wait()) for event in (back, self._ended)]
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for task in waiting:
            task.cancel()

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        except BaseException as exc:  # whatever it was: the engine's state is unknown, so the worker ends
            self.report(self._on_failure, exc)
        self.report(self._ended.set)

    def _turn(self) -> bool:
        """Waits for something to do and does it; whether to go on."""
        with self._wake:
            while not (self._inbox or self._phase is _Phase.ENDING or self._may_step):
                self._wake.wait()
            commands, self._inbox = self._inbox, deque()
            phase = self._phase
        for command in commands:
            command(self._engine)
        if phase is _Phase.STEPPING:
            # Also without work: commands may have left events (stored blocks, reserved targets) that a step collects.
            result = self._engine.step(self._clock())
            self.stats = self._engine.stats()
            self.report(self._on_step, result, self.stats)
        return phase is not _Phase.ENDING

    @property
    def _may_step(self) -> bool:
        return self._phase is _Phase.STEPPING and self._engine.has_work

    def report(self, callback: Callable[..., None], *args: object) -> None:
        """From a command: has `callback` called on the loop, in order with what steps bring."""
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:
            # The loop is closed: nobody is left to hear of it.
            self._phase = _Phase.ENDING
