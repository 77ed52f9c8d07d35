"""A gateway's membership and generator over fake workers, with a clock that a test moves."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count

from assigned import num_assigned
from cluster.generator import SequenceChunk, SequenceRequest
from cluster.membership import Membership
from cluster.request_run import RunLimits
from cluster.routed_generator import RoutedGenerator
from cluster.router import RouterConfig
from cluster.worker_info import Role
from cluster.worker_link import LinkConfig, WorkerLink
from engine.sampling_params import SamplingParams
from fake_worker import FakeRequest, FakeWorker
from manual_clock import ManualClock

_serial = count()


def request(prompt: tuple[int, ...] = (1, 2, 3), max_tokens: int = 6, **changes: object) -> SequenceRequest:
    fields = {"request_id": f"r{next(_serial)}", "params": SamplingParams(max_tokens=max_tokens)}
    return SequenceRequest(prompt_token_ids=prompt, **(fields | changes))


class FakeCluster:
    """Everything of a gateway that is below text, and the workers."""

    def __init__(self, router: RouterConfig, link: LinkConfig, limits: RunLimits, max_concurrent: int) -> None:
        self.clock = ManualClock()
        self.membership = Membership(router, link, clock=self.clock)
        self.generator = RoutedGenerator(self.membership, limits, max_concurrent=max_concurrent)
        self.workers: dict[str, FakeWorker] = {}
        self._arrivals: asyncio.Queue[FakeRequest] = asyncio.Queue()

    async def start(self, worker: FakeWorker, address: str = "127.0.0.1:0") -> FakeWorker:
        """Starts a worker, in the place of an older one of that name."""
        worker.arrivals = self._arrivals
        await worker.start(address)
        self.workers[worker.worker_id] = worker
        return worker

    async def join(self, worker: FakeWorker) -> WorkerLink:
        """Starts a worker and waits until the gateway has it."""
        await self.start(worker)
        link = self.membership.add_worker(worker.address)
        await self.membership.wait_link(link)
        return link

    async def next_request(self) -> FakeRequest:
        """The next request, at whichever worker it comes to."""
        return await self._arrivals.get()

    async def collect(self, sequence: SequenceRequest) -> list[SequenceChunk]:
        return [chunk async for chunk in self.generator.generate(sequence)]

    async def tokens(self, sequence: SequenceRequest) -> list[int]:
        return token_ids(await self.collect(sequence))


def token_ids(chunks: list[SequenceChunk]) -> list[int]:
    return [token.token_id for chunk in chunks for token in chunk.tokens]


@asynccontextmanager
async def fake_cluster(
    names: str = "d0",
    *,
    automatic: bool = False,
    router: RouterConfig | None = None,
    link: LinkConfig | None = None,
    limits: RunLimits | None = None,
    max_concurrent: int = 100,
) -> AsyncIterator[FakeCluster]:
    """Workers named after their role (p0, d1), all of them ready; at the end everything is whole and let go."""
    cluster = FakeCluster(router or RouterConfig(), link or LinkConfig(), limits or RunLimits(), max_concurrent)
    try:
        for name in names.split():
            role = Role.PREFILL if name.startswith("p") else Role.DECODE
            await cluster.join(FakeWorker(name, role, automatic=automatic))
        yield cluster
        cluster.membership.ledger.check_integrity()
        cluster.membership.directory.check_integrity()
        assert num_assigned(cluster.membership.ledger) == cluster.generator.stats.num_active
    finally:
        await cluster.membership.close()
        await asyncio.gather(*(worker.kill() for worker in cluster.workers.values()))
