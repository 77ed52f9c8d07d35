"""A whole cluster for tests: workers in processes of their own, the gateway here, no Ray."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict
from pathlib import Path

import yaml

from cluster.config import load_config
from cluster.gateway import Gateway
from cluster.membership import Membership
from cluster.router import RouterConfig
from cluster.worker_plan import PlannedWorker, plan_workers

START_S = 120.0


@asynccontextmanager
async def served(folder: Path, **flags: object) -> AsyncIterator[Gateway]:
    """A cluster of the embedded model; flags as for `tandem serve`."""
    config = load_config(flags={"port": 0, "threads": 1, "dtype": "float32", **flags})
    plan = plan_workers(config)
    async with AsyncExitStack() as stack:
        membership = Membership(RouterConfig(max_local_prefill_tokens=config.max_local_prefill_tokens))
        gateway = Gateway(config, membership)
        stack.push_async_callback(membership.close)
        stack.push_async_callback(gateway.stop)
        addresses = await asyncio.gather(*(_start(stack, folder, worker) for worker in plan.workers))
        for address in addresses:
            membership.add_worker(address)
        await membership.wait_ready(prefill_workers=config.prefill_workers, decode_workers=config.decode_workers)
        await gateway.start()
        yield gateway


async def _start(stack: AsyncExitStack, folder: Path, worker: PlannedWorker) -> str:
    path = folder / f"{worker.worker_id}.yaml"
    path.write_text(yaml.safe_dump(asdict(worker.config)))
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", f"{worker.role.value}_worker", "--config", str(path), stdout=asyncio.subprocess.PIPE
    )
    stack.push_async_callback(_end, process)
    assert process.stdout is not None
    line = (await asyncio.wait_for(process.stdout.readline(), START_S)).decode()
    assert line.startswith("listening on "), f"{worker.worker_id} did not start: {line}"
    return line.removeprefix("listening on ").strip()


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.terminate()
    assert await asyncio.wait_for(process.wait(), START_S) == 0, "a worker did not end well"
