"""The process of a worker that is started by hand, without Ray."""

import argparse
import asyncio
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from worker.config import WorkerConfig
from worker.heap import settle_heap
from worker.log import configure_logging
from worker.node import EngineFailed, WorkerNode


def run(program: str, make_worker: Callable[[WorkerConfig], WorkerNode]) -> None:
    """Reads the configuration, runs the worker until a signal ends it; exits 1 with one sentence if it cannot."""
    parser = argparse.ArgumentParser(prog=f"python -m {program}", description="One Tandem worker, without Ray.")
    parser.add_argument("--config", type=Path, required=True, help="YAML file, see docs/workers.md")
    arguments = parser.parse_args()
    try:
        config = WorkerConfig.from_yaml(arguments.config)
        configure_logging(config.log_level, config.log_format, worker_id=config.worker_id)
        asyncio.run(_serve(make_worker(config)))
    except (ValueError, OSError, EngineFailed) as exc:
        sys.exit(f"{program}: {exc}")


async def _serve(worker: WorkerNode) -> None:
    loop = asyncio.get_running_loop()
    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopped.set)
    try:
        address = await worker.start()
        settle_heap()
        print(f"listening on {address}", flush=True)
        failed = asyncio.ensure_future(worker.wait())
        signalled = asyncio.ensure_future(stopped.wait())
        await asyncio.wait({failed, signalled}, return_when=asyncio.FIRST_COMPLETED)
        signalled.cancel()
        if failed.done():
            failed.result()
        failed.cancel()
    finally:
        await worker.stop()
