"""Marks in a GPU's work, that its own process and peers wait for: a ring of events, made once."""

from contextlib import ExitStack, suppress

from engine.cuda.runtime import CudaError, CudaRuntime
from kvtransfer.errors import TransferError

# Recorded in turn. A reader that comes so many steps late waits for a later step: never too short.
NUM_FENCES = 16


def check_fence(fence: int) -> None:
    """
    Raises:
        TransferError: there is no such mark.
    """
    if not 0 <= fence < NUM_FENCES:
        raise TransferError(f"fence {fence} is not one of {NUM_FENCES}: the holder runs another version")


class FenceRing:
    """The owner's side: events of the current device. `record` on one thread, the rest on any.

    All are made at birth, since making or opening events beside running work can stall it. One event, `birth`, is
    recorded once and for all: waiting for it never waits for the engine's work.
    """

    def __init__(self, runtime: CudaRuntime, *, interprocess: bool) -> None:
        """
        Raises:
            CudaError: the device gives no (interprocess) events.
        """
        self._runtime = runtime
        self._latest: int | None = None
        with ExitStack() as undo:
            self.events: list[int] = []
            for _ in range(1 + NUM_FENCES):
                event = runtime.event_create(interprocess=interprocess)
                undo.callback(runtime.event_destroy, event)
                self.events.append(event)
            self.birth, *self._fences = self.events
            undo.pop_all()

    def record(self, stream: int) -> int:
        """Marks what `stream` has been given so far."""
        fence = 0 if self._latest is None else (self._latest + 1) % NUM_FENCES
        self._runtime.event_record(self._fences[fence], stream)
        self._latest = fence  # only now: waiting for an event that is not recorded yet passes at once
        return fence

    def wait(self, stream: int, fence: int) -> None:
        """What `stream` is given from now on comes after the mark.

        Raises:
            TransferError: there is no such mark.
        """
        check_fence(fence)
        self._runtime.stream_wait_event(stream, self._fences[fence])

    def wait_latest(self, stream: int) -> None:
        """What `stream` is given from now on comes after all that has been marked."""
        latest = self._latest
        if latest is not None:
            self._runtime.stream_wait_event(stream, self._fences[latest])

    def close(self) -> None:
        """Idempotent."""
        for event in self.events:
            with suppress(CudaError):  # the device is lost, and its events with it
                self._runtime.event_destroy(event)
        self.events = []
