"""A worker, put together: engine thread, both ends of hand-offs, gRPC server, metrics.

What is started is given back in the reverse order: streams end first, then hand-offs and their copies, then the
engine's thread, and the pool's memory last.
"""

import asyncio
import uuid
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from engine.outputs import StepResult
from engine.stats import EngineStats
from kvtransfer.channels import SERVER_OPTIONS
from kvtransfer.messages import HandoffTimes
from kvtransfer.peer_tls import PeerTls, add_peer_port
from kvtransfer.ports import HolderPool
from kvtransfer.provider import Provider
from kvtransfer.service import KvExchangeService
from kvtransfer.staging import stage_pool
from tandem.v1 import exchange_pb2, exchange_pb2_grpc, worker_pb2_grpc
from tandem.v1 import worker_pb2 as pb
from worker.build import BuiltEngine, build_engine
from worker.config import WorkerConfig
from worker.context import Role, WorkerContext
from worker.drain import Drain
from worker.engine_thread import EngineThread
from worker.host import host_id
from worker.kv_events import KvEventPublisher
from worker.load import LoadReporter
from worker.metrics import MetricsEndpoint, Snapshot, WorkerMetrics
from worker.service import WorkerService
from worker.structures import Structures, model_compiler

ROLES = {pb.ROLE_PREFILL: "prefill", pb.ROLE_DECODE: "decode"}


def peer_tls(config: WorkerConfig) -> PeerTls | None:
    """What a worker shows its peers; None: connections are plain.

    Raises:
        ValueError: the files are no good.
    """
    ca_file, cert_file, key_file = config.internal_files
    if ca_file is None or cert_file is None or key_file is None:
        return None
    return PeerTls.load(ca_file, cert_file, key_file, config.internal_server_name)


class EngineFailed(RuntimeError):
    """The engine raised: its state is unknown, and the worker at its end."""


class WorkerNode:
    """One worker process's everything, for one role.

    Args:
        make_role: puts together what a role does otherwise; called on the loop, once the engine is loaded.
        clock: monotonic seconds, by which requests are timed.
    """

    def __init__(
        self,
        config: WorkerConfig,
        role: pb.Role,
        make_role: Callable[[WorkerContext], Role],
        clock: Callable[[], float],
    ) -> None:
        self.config = config
        self.instance_id = uuid.uuid4().hex
        self._role_kind = role
        self._make_role = make_role
        self._clock = clock
        self._failure: asyncio.Future[None] | None = None
        self._stack = AsyncExitStack()

    async def start(self) -> str:
        """Loads, listens, and returns the address (host:port) of the gRPC server.

        Raises:
            ValueError, FileNotFoundError: the model or the configuration is no good.
            OSError: the port is taken.
        """
        async with AsyncExitStack() as stack:
            address = await self._start(stack)
            self._stack = stack.pop_all()  # all is well: closed by `stop`
        return address

    async def wait(self) -> None:
        """Returns never, but for a failure.

        Raises:
            EngineFailed: the engine raised; the worker can only be stopped.
        """
        assert self._failure is not None, "wait before start"
        await asyncio.shield(self._failure)

    async def stop(self) -> None:
        """Aborts what is in flight and gives everything back; idempotent."""
        await self._stack.aclose()

    async def _start(self, stack: AsyncExitStack) -> str:
        config = self.config
        self._failure = asyncio.get_running_loop().create_future()
        # Looked at even if nobody waits: else asyncio complains of an exception never retrieved.
        self._failure.add_done_callback(lambda failure: failure.cancelled() or failure.exception())
        tls = peer_tls(config)  # first: what is wrong with a file is known before a model is loaded
        built = await asyncio.to_thread(build_engine, config)
        stack.callback(built.memory.close)
        self._stats = built.engine.stats()

        labels = (config.model_name, config.worker_id, ROLES[self._role_kind])
        metrics = WorkerMetrics(labels, self._snapshot)
        thread = EngineThread(built.engine, self._on_step, self._on_failure, self._clock)
        drain = Drain()
        times = HandoffTimes(
            lease_s=config.lease_s, answer_s=min(10.0, config.lease_s), deadline_s=config.handoff_timeout_s
        )
        self._structures = structures = Structures(
            partial(model_compiler, config.model, built.vocab_size), lambda: self._load.changed()
        )
        context = WorkerContext(
            config, self.instance_id, built, thread, drain, metrics, times, structures, self._clock, tls
        )
        self._role = role = self._make_role(context)
        handle = built.memory.handle(self.instance_id, built.layout)
        staged = stage_pool(role, built.memory, built.layout, self.instance_id)
        self._provider = Provider(HolderPool(handle, built.layout), role, times, staged=staged)
        self._events = KvEventPublisher()
        self._load = LoadReporter(lambda: self._measure(drain))
        stack.callback(self._load.close)
        stack.callback(self._check_integrity, built)
        thread.start()
        stack.push_async_callback(thread.stop)
        # Before the engine's thread ends, no copy may be in flight, and every pin is given back.
        if staged is not None:
            stack.push_async_callback(staged.close)
        stack.push_async_callback(role.puller.close)
        stack.callback(structures.close)
        stack.callback(self._provider.close)

        endpoint = metrics.serve(config.host, config.metrics_port)
        stack.push_async_callback(asyncio.to_thread, endpoint.close)
        description = self._describe(built, endpoint)
        service = WorkerService(
            description, self._events, role, self._load, drain, config.drain_timeout_s, self._not_serving
        )
        return await self._serve(stack, service, tls)

    async def _serve(self, stack: AsyncExitStack, service: WorkerService, tls: PeerTls | None) -> str:
        server = grpc.aio.server(options=SERVER_OPTIONS)
        worker_pb2_grpc.add_WorkerServicer_to_server(service, server)  # type: ignore[no-untyped-call]
        exchange = KvExchangeService(self._provider)
        exchange_pb2_grpc.add_KvExchangeServicer_to_server(exchange, server)  # type: ignore[no-untyped-call]
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        names = [
            pb.DESCRIPTOR.services_by_name["Worker"].full_name,
            exchange_pb2.DESCRIPTOR.services_by_name["KvExchange"].full_name,
            health.SERVICE_NAME,
        ]
        reflection.enable_server_reflection([*names, reflection.SERVICE_NAME], server)
        for name in ("", *names):
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)
        port = add_peer_port(server, f"{self.config.host}:{self.config.port}", tls)
        await server.start()
        # Streams are cancelled at once: their requests are aborted, as when the process dies.
        stack.push_async_callback(server.stop, None)
        return f"{self.config.host}:{port}"

    async def _not_serving(self) -> None:
        """Draining: health checks shall send nothing new here."""
        await self._health.enter_graceful_shutdown()

    def _describe(self, built: BuiltEngine, endpoint: MetricsEndpoint) -> pb.DescribeResponse:
        # The engine's own: it may have found room for more blocks than it was told.
        engine = built.engine.config
        return pb.DescribeResponse(
            worker_id=self.config.worker_id,
            instance_id=self.instance_id,
            role=self._role_kind,
            model_name=self.config.model_name,
            model_path=built.model_path,
            fingerprint=built.layout.fingerprint,
            block_size=engine.block_size,
            num_blocks=engine.num_blocks,
            max_model_len=engine.max_model_len,
            max_num_seqs=engine.max_num_seqs,
            max_num_batched_tokens=engine.max_num_batched_tokens,
            vocab_size=built.vocab_size,
            bytes_per_block=built.layout.bytes_per_block,
            dtype=built.dtype,
            metrics_address=endpoint.address,
            host_id=host_id(),
            device=built.device,
        )

    # --- what the engine says

    def _on_step(self, result: StepResult, stats: EngineStats) -> None:
        self._stats = stats
        self._role.on_step(result)
        self._events.publish(result.kv_events)
        self._load.changed()

    def _on_failure(self, error: BaseException) -> None:
        assert self._failure is not None
        self._role.on_failure(error)
        self._provider.close()
        failure = EngineFailed(f"the engine failed: {type(error).__name__}: {error}")
        failure.__cause__ = error
        if not self._failure.done():
            self._failure.set_exception(failure)

    def _check_integrity(self, built: BuiltEngine) -> None:
        """All streams have ended and the engine's thread too: nothing may be held any more."""
        assert self._failure is not None
        if not self._failure.done():
            built.engine.check_integrity()
            stats = built.engine.stats()
            assert stats.num_active_blocks == 0, f"{stats.num_active_blocks} blocks are held by nobody at the end"

    # --- what it counts

    def _snapshot(self) -> Snapshot:
        return Snapshot(
            engine=replace(self._stats, num_waiting=self._num_waiting),
            num_transferring=self._num_transferring,
            given=self._provider.counters,
            taken=self._role.puller.counters,
        )

    @property
    def _num_transferring(self) -> int:
        return self._provider.num_active + self._role.puller.num_active

    @property
    def _num_waiting(self) -> int:
        """For blocks, for their prompt, or for their structure."""
        return self._stats.num_waiting + self._structures.num_preparing

    def _measure(self, drain: Drain) -> pb.Load:
        stats = self._stats
        return pb.Load(
            num_running=stats.num_running,
            num_waiting=self._num_waiting,
            num_transferring=stats.num_receiving,
            num_free_blocks=stats.num_free_blocks,
            num_cached_blocks=stats.num_cached_blocks,
            num_active_blocks=stats.num_active_blocks,
            num_waiting_tokens=stats.num_waiting_tokens,
            draining=drain.draining,
        )
