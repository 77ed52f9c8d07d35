"""The decode worker: a `WorkerNode` in that role."""

import time
from collections.abc import Callable

from decode_worker.requests import DecodeRole
from tandem.v1 import worker_pb2 as pb
from worker.config import WorkerConfig
from worker.node import WorkerNode


class DecodeWorker(WorkerNode):
    """`await start()` gives its address, `await wait()` raises if it fails, `await stop()` ends it."""

    def __init__(self, config: WorkerConfig, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(config, pb.ROLE_DECODE, DecodeRole, clock)
