"""A gateway over real workers whose tokens are hashes of what their pools hold: sockets, threads, everything."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from cluster.config import ClusterConfig
from cluster.gateway import Gateway
from cluster.membership import Membership
from cluster.router import RouterConfig
from decode_worker import DecodeWorker
from engine.config import EngineConfig
from prefill_worker import PrefillWorker
from worker.config import WorkerConfig

MODEL = "hash-model"
VOCAB_SIZE = 1000
MAX_MODEL_LEN = 256


@asynccontextmanager
async def running(*, num_blocks: int = 64, **config: Any) -> AsyncIterator[Gateway]:
    """One prefill worker p0, one decode worker d0; every prompt is handed off.

    Args:
        num_blocks: of each worker's pool.
        config: of the cluster.
    """
    engine = EngineConfig(num_blocks=num_blocks, max_model_len=MAX_MODEL_LEN, max_num_batched_tokens=64)
    membership = Membership(RouterConfig(max_local_prefill_tokens=0))
    fields = {"port": 0, "grpc_port": 0, "shutdown_timeout_s": 2.0} | config
    gateway = Gateway(ClusterConfig(**fields), membership)
    workers = [
        kind(WorkerConfig(engine=engine, worker_id=name, executor="hash", served_model_name=MODEL))
        for kind, name in ((PrefillWorker, "p0"), (DecodeWorker, "d0"))
    ]
    try:
        starting = asyncio.create_task(gateway.start())
        for worker in workers:
            membership.add_worker(await worker.start())
        await membership.wait_ready(prefill_workers=1)
        await starting
        yield gateway
    finally:
        await gateway.stop()
        await membership.close()
        for worker in workers:
            await worker.stop()
