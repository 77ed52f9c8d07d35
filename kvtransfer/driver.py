"""Runs one state machine on the event loop."""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from kvtransfer.events import Tick

Event = TypeVar("Event")
Action = TypeVar("Action")
Event_contra = TypeVar("Event_contra", contravariant=True)


class Machine(Protocol[Event_contra, Action]):
    """A `Holder` or a `Consumer`."""

    @property
    def next_deadline(self) -> float | None: ...

    def start(self, now: float) -> list[Action]: ...

    def handle(self, event: Event_contra, now: float) -> list[Action]: ...


class Driver(Generic[Event, Action]):
    """Gives a machine its events one at a time, does its actions, and wakes it at its deadlines.

    Doing an action may cause the next event at once: it waits until the actions before it are done, so that they stay
    in order.
    """

    def __init__(self, machine: Machine[Event | Tick, Action], act: Callable[[Action], None]) -> None:
        self._machine = machine
        self._act = act
        self._loop = asyncio.get_running_loop()
        self._todo: deque[Callable[[float], list[Action]]] = deque()
        self._is_running = False
        self._timer: asyncio.TimerHandle | None = None
        self._wakes_at: float | None = None

    def start(self) -> None:
        """Lets the machine begin."""
        self._run(self._machine.start)

    def post(self, event: Event | Tick) -> None:
        """Something has happened."""
        self._run(lambda now: self._machine.handle(event, now))

    def _run(self, step: Callable[[float], list[Action]]) -> None:
        self._todo.append(step)
        if self._is_running:
            return
        self._is_running = True
        try:
            while self._todo:
                for action in self._todo.popleft()(self._loop.time()):
                    self._do(action)
        finally:
            self._is_running = False
        self._set_timer()

    def _do(self, action: Action) -> None:
        try:
            self._act(action)
        except Exception as error:
            # A bug in a port must not keep the actions after it from giving blocks back.
            self._loop.call_exception_handler({"message": f"{action} failed", "exception": error})

    def _set_timer(self) -> None:
        deadline = self._machine.next_deadline
        if deadline == self._wakes_at:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._wakes_at = deadline
        self._timer = None if deadline is None else self._loop.call_at(deadline, self._tick)

    def _tick(self) -> None:
        self._wakes_at = self._timer = None
        self.post(Tick())
