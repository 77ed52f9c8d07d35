"""Workers that a test starts, and that prove at its end that they hold nothing any more."""

from collections.abc import AsyncIterator

import pytest

from decode_worker import DecodeWorker
from decode_workers import ENGINE, Start
from prefill_worker import PrefillWorker
from worker.config import WorkerConfig
from worker.node import WorkerNode


@pytest.fixture
async def workers() -> AsyncIterator[dict[str, WorkerNode]]:
    """By worker id; all are stopped at the end, which proves that nothing is held any more."""
    started: dict[str, WorkerNode] = {}
    yield started
    for worker in started.values():
        await worker.stop()


@pytest.fixture
async def start(workers: dict[str, WorkerNode]) -> Start:
    async def start(
        kind: type[DecodeWorker] | type[PrefillWorker], worker_id: str, **options: object
    ) -> tuple[str, str]:
        options = {"engine": ENGINE, "executor": "hash", **options}
        worker = workers[worker_id] = kind(WorkerConfig(worker_id=worker_id, **options))  # type: ignore[arg-type]
        return worker_id, await worker.start()

    return start
