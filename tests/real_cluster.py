"""A gateway's lower half over real workers in this process, real but for the model."""

import asyncio
import random
from collections.abc import AsyncIterator
from concurrent.futures import Future
from contextlib import AsyncExitStack, aclosing, asynccontextmanager

from assigned import num_assigned
from cluster.generator import SequenceRequest
from cluster.membership import Membership
from cluster.routed_generator import RoutedGenerator
from cluster.router import RouterConfig
from decode_worker import DecodeWorker
from engine.config import EngineConfig
from engine.hash_executor import expected_tokens
from engine.kvcache.block_hash import BlockHash
from fake_cluster import token_ids
from prefill_worker import PrefillWorker
from worker.config import WorkerConfig
from worker.node import WorkerNode

VOCAB_SIZE = 1000
MAX_MODEL_LEN = 512
APART = RouterConfig(max_local_prefill_tokens=0)
DEFAULT = RouterConfig(max_local_prefill_tokens=40)


class RealCluster:
    """A gateway's membership and generator, and workers in this process."""

    def __init__(self, router: RouterConfig) -> None:
        self.membership = Membership(router)
        self.generator = RoutedGenerator(self.membership)
        self.workers: dict[str, WorkerNode] = {}

    async def start(self, name: str, *, port: int = 0, num_blocks: int = 64) -> WorkerNode:
        """Starts a worker named after its role (p0, d1)."""
        kind = PrefillWorker if name.startswith("p") else DecodeWorker
        engine = EngineConfig(num_blocks=num_blocks, max_model_len=MAX_MODEL_LEN, max_num_batched_tokens=64)
        worker = kind(WorkerConfig(engine=engine, worker_id=name, executor="hash", port=port))
        address = await worker.start()
        self.workers[name] = worker
        await self.membership.wait_link(self.membership.add_worker(address))
        return worker

    async def tokens(self, sequence: SequenceRequest) -> list[int]:
        async with aclosing(self.generator.generate(sequence)) as chunks:
            return token_ids([chunk async for chunk in chunks])

    def port(self, name: str) -> int:
        infos = [status.info for status in self.membership.workers() if status.info]
        return next(int(info.address.rpartition(":")[2]) for info in infos if info.worker_id == name)

    async def directory_agrees(self) -> None:
        """Returns once the directory holds exactly what the workers cache."""
        directory = self.membership.directory
        for worker in self.workers.values():
            while True:
                cached = await cached_hashes(worker)
                key = worker.instance_id
                if directory.num_blocks(key) == len(cached) and all(key in directory.workers_of(h) for h in cached):
                    break
        directory.check_integrity()


async def cached_hashes(worker: WorkerNode) -> list[BlockHash]:
    """What the worker's pool caches now, by its own word."""
    answer: Future[list[BlockHash]] = Future()
    worker._role._thread.post(lambda engine: answer.set_result(engine.cached_hashes()))
    return await asyncio.wrap_future(answer)


@asynccontextmanager
async def real_cluster(names: str, router: RouterConfig = DEFAULT) -> AsyncIterator[RealCluster]:
    """At the end every worker proves that nothing is held any more, and the router that nothing is owed."""
    async with AsyncExitStack() as stack:
        cluster = RealCluster(router)

        async def stop() -> None:
            await cluster.membership.close()
            for worker in cluster.workers.values():
                await worker.stop()

        stack.push_async_callback(stop)
        for name in names.split():
            await cluster.start(name)
        yield cluster
        cluster.membership.ledger.check_integrity()
        assert num_assigned(cluster.membership.ledger) == 0


def prompt_of(length: int, seed: int = 1) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.randrange(VOCAB_SIZE) for _ in range(length))


def expected(sequence: SequenceRequest) -> list[int]:
    return expected_tokens(sequence.prompt_token_ids, sequence.params, VOCAB_SIZE, max_model_len=MAX_MODEL_LEN)
