"""The thread that owns an engine: commands in, step results out.

An engine belongs to one thread. Everyone else (the asyncio loop with its gRPC handlers, mostly) posts functions,
which run between two steps, in order. A step's result goes to `on_step`, on the loop.
"""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable

from engine.engine import Engine
from engine.outputs import StepResult
from engine.stats import EngineStats


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
        self._on_step = on_step
        self._on_failure = on_failure
        self._clock = clock
        self._inbox: deque[Callable[[Engine], None]] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Begins to step; call it on the loop that shall hear of the steps."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def post(self, command: Callable[[Engine], None]) -> None:
        """Has `command` run between two steps. It must not raise: that counts as the engine's failure."""
        with self._wake:
            self._inbox.append(command)
            self._wake.notify()

    async def stop(self) -> None:
        """Runs what was posted before, then ends the thread; idempotent."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.ident is not None:
            await asyncio.to_thread(self._thread.join)

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        except BaseException as exc:  # whatever it was: the engine's state is unknown, so the worker ends
            self.report(self._on_failure, exc)

    def _turn(self) -> bool:
        """Waits for something to do and does it; whether to go on."""
        with self._wake:
            while not (self._inbox or self._stopping or self._engine.has_work):
                self._wake.wait()
            commands, self._inbox = self._inbox, deque()
            stopping = self._stopping
        for command in commands:
            command(self._engine)
        if stopping:
            return False
        # Also without work: commands may have left events (stored blocks, reserved targets) that a step collects.
        result = self._engine.step(self._clock())
        self.report(self._on_step, result, self._engine.stats())
        return True

    def report(self, callback: Callable[..., None], *args: object) -> None:
        """From a command: has `callback` called on the loop, in order with what steps bring."""
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:
            # The loop is closed: nobody is left to hear of it.
            self._stopping = True
