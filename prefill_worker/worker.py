"""The prefill worker: a `WorkerNode` in that role."""

import time
from collections.abc import Callable

from prefill_worker.prefills import PrefillRole
from tandem.v1 import worker_pb2 as pb
from worker.config import WorkerConfig
from worker.node import WorkerNode


class PrefillWorker(WorkerNode):
    """`await start()` gives its address, `await wait()` raises if it fails, `await stop()` ends it."""

    def __init__(self, config: WorkerConfig, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(config, pb.ROLE_PREFILL, PrefillRole, clock)
