"""What every part of one worker needs to know of it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from engine.memory import KVLayout
from engine.outputs import StepResult
from kvtransfer.messages import HandoffTimes
from kvtransfer.peer_tls import PeerTls
from kvtransfer.ports import HolderPort
from kvtransfer.puller import Puller
from worker.build import BuiltEngine
from worker.config import WorkerConfig
from worker.drain import Drain
from worker.engine_thread import EngineThread
from worker.metrics import WorkerMetrics
from worker.session import SessionHandler
from worker.structures import Structures


@dataclass(frozen=True, slots=True)
class WorkerContext:
    """One start of one worker."""

    config: WorkerConfig
    instance_id: str
    built: BuiltEngine
    thread: EngineThread
    drain: Drain
    metrics: WorkerMetrics
    times: HandoffTimes
    structures: Structures
    clock: Callable[[], float]  # seconds; the engine's thread has the same
    tls: PeerTls | None = None  # to other workers

    @property
    def layout(self) -> KVLayout:
        return self.built.layout


class Role(SessionHandler, HolderPort, Protocol):
    """What a prefill worker does otherwise than a decode worker. Lives on the loop."""

    puller: Puller

    @property
    def num_transferring(self) -> int:
        """Requests whose KV is being handed over, in or out."""
        ...

    def on_step(self, result: StepResult) -> None: ...

    def on_failure(self, error: BaseException) -> None:
        """The engine is gone: tell everyone who waits for it."""
        ...
