"""Places workers on a Ray cluster of three machines whose GPUs are only said to be there, and prints where they are.

Run by `test_gpu_placement.py` in a process of its own: a process can join one Ray cluster in its life.
"""

import asyncio
import json
import sys
from typing import Any

import ray
from ray.cluster_utils import Cluster

from cluster.actors import RayMachines, RayProcess, connect, disconnect
from cluster.fleet import Fleet, FleetError
from cluster.placement import place
from cluster.worker_info import Role
from cluster.worker_plan import PlannedWorker
from engine.config import EngineConfig
from worker.config import WorkerConfig

OBJECT_STORE_BYTES = 80 << 20
GPUS = (2, 1, 1)  # of the machines
PATIENCE_S = 60.0


def planned(prefill: int, decode: int, num_gpus: float) -> list[PlannedWorker]:
    engine = EngineConfig(num_blocks=64, max_model_len=256)
    return [
        PlannedWorker(
            role, WorkerConfig(engine=engine, worker_id=f"{role.value}-{i}", executor="hash", threads=1), num_gpus
        )
        for role, count in ((Role.PREFILL, prefill), (Role.DECODE, decode))
        for i in range(count)
    ]


class NoMembership:
    def add_worker(self, address: str) -> None:
        raise AssertionError(f"{address} serves, and nobody started it")

    async def remove_worker(self, address: str, /) -> None:
        raise AssertionError(f"{address} is gone, and nobody started it")


def look(_: object) -> dict[str, Any]:
    """Called in a worker's process."""
    import os

    return {
        "node": ray.get_runtime_context().get_node_id(),
        "gpus": ray.get_gpu_ids(),
        "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
    }


async def seen(process: RayProcess) -> dict[str, Any]:
    answer: dict[str, Any] = await process.actor.__ray_call__.remote(look)
    return answer


async def placed(machines: RayMachines, workers: list[PlannedWorker]) -> dict[str, dict[str, Any]]:
    """Where each worker is, and which GPU it has."""
    where = {}
    for group in place(workers):
        processes = await asyncio.wait_for(machines.place(group), PATIENCE_S)
        found = await asyncio.gather(*map(seen, processes))
        where |= {worker.worker_id: one for worker, one in zip(group.workers, found, strict=True)}
    return where


async def main() -> None:
    cluster = Cluster()
    for num_gpus in GPUS:
        cluster.add_node(num_cpus=4, num_gpus=num_gpus, object_store_memory=OBJECT_STORE_BYTES, include_dashboard=False)
    connect(cluster.address, num_cpus=0)
    report: dict[str, Any] = {}
    machines = RayMachines()
    try:
        # First, while all GPUs are free: what is released becomes free a little later, and Ray does not wait to spread.
        report["spread"] = await placed(machines, planned(0, 3, 1.0))
        await machines.release()
        report["pair"] = await placed(machines, planned(1, 1, 1.0))
        # The two GPUs that are left are on two machines: no place for a pair.
        fleet = Fleet(planned(1, 1, 1.0), NoMembership(), RayMachines(), start_timeout_s=1.0)
        try:
            await fleet.start()
        except FleetError as exc:
            report["no room"] = str(exc)
        await fleet.stop(timeout_s=1.0)
        await machines.release()
        report["shared"] = await placed(machines, planned(2, 2, 0.5))
        await machines.release()
    finally:
        await disconnect()
        cluster.shutdown()
    json.dump(report, sys.stdout)


if __name__ == "__main__":
    asyncio.run(main())
