"""A whole cluster in one process's hands: Ray, the workers, the gateway; from nothing to ready and back to nothing.

Starting: the gateway binds its ports, so that one in use is known at once; Ray starts; the workers start side by side,
each a member as soon as it serves; ready is when all are, and a request has gone the whole way. Ending goes the other
way round: the gateway takes no more requests and lets those in flight end, the workers stop, Ray goes.
"""

import asyncio
import socket
from collections.abc import Callable

import httpx

from cluster.channel import ChannelConfig
from cluster.cli.api_client import ApiClient, trust_only
from cluster.config import ClusterConfig
from cluster.fleet import Fleet, FleetError
from cluster.gateway import Gateway
from cluster.membership import Membership
from cluster.router import RouterConfig
from cluster.tls import internal_tls
from cluster.worker_link import LinkConfig
from cluster.worker_plan import WorkerPlan

# Of the first request, beside what may be prefilled on the decode worker: enough to go the long way.
_FIRST_TOKENS = 8
# For answers to be cut off in words, when all shall end at once.
_HURRY_S = 0.5


class Serving:
    """One cluster, from `start` to `stop`.

    Args:
        on_ray_started: called once; Ray takes over the signals of whoever starts it, who may want them back.

    Raises:
        ConfigError: a file of keys or certificates is no good, or traces cannot be sent.
    """

    def __init__(self, config: ClusterConfig, plan: WorkerPlan, on_ray_started: Callable[[], None]) -> None:
        self._config = config
        self._plan = plan
        self._on_ray_started = on_ray_started
        self.membership = Membership(
            RouterConfig(max_local_prefill_tokens=config.max_local_prefill_tokens),
            LinkConfig(
                channel=ChannelConfig(
                    config.keepalive_s, keepalive_timeout_s=2 * config.keepalive_s, tls=internal_tls(config)
                )
            ),
        )
        self.gateway = Gateway(config, self.membership)
        self._ray: asyncio.Future[None] | None = None
        self._fleet: Fleet | None = None

    @property
    def base_url(self) -> str:
        """Of the HTTP API, as this machine reaches it."""
        # Where it listens on all addresses, this machine's own is one of them.
        url = httpx.URL(self.gateway.base_url)
        return str(url.copy_with(host={"0.0.0.0": "127.0.0.1", "::": "::1"}.get(url.host, url.host))).rstrip("/")

    async def start(self) -> None:
        """Returns when requests can be served: one has been.

        Raises:
            FleetError: Ray or a worker did not start.
            OSError: a port cannot be had.
            ValueError: the model has no tokenizer that can be read, or workers do not fit each other.
            ServerError: the first request failed.
        """
        _require_free(self._config.host, self._config.port, "HTTP")
        _require_free(self._config.host, self._config.grpc_listen_port, "gRPC")
        tasks = [asyncio.create_task(self.gateway.start())]
        # It has bound its port when it first waits, or failed: not worth starting Ray for.
        await asyncio.sleep(0)
        if not tasks[0].done():
            tasks.append(asyncio.create_task(self._start_workers()))
        try:
            await asyncio.gather(*tasks)
        finally:
            # One has failed, or we are told to leave off: the other must not go on behind.
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        await self._first_request()

    async def stop(self, at_once: asyncio.Event) -> None:
        """Ends everything, whatever `start` has got to; once `at_once` is set, without waiting."""
        await self._stop_gateway(at_once)
        if self._ray is None:
            return
        # Ray starts in a thread, which cannot be told to leave off.
        await asyncio.wait((self._ray,))
        from cluster import actors

        if self._fleet is not None:
            await self._fleet.stop(0.0 if at_once.is_set() else self._config.shutdown_timeout_s)
        await actors.disconnect()

    async def _stop_gateway(self, at_once: asyncio.Event) -> None:
        hurry = asyncio.create_task(at_once.wait())
        ending = asyncio.create_task(self.gateway.stop())
        # Requests that go on for too long lose their workers before the gateway cuts their connections: so their
        # clients are told what has happened.
        patience_s = 0.8 * self._config.shutdown_timeout_s
        await asyncio.wait((ending, hurry), timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
        hurry.cancel()
        await self.membership.close()
        await asyncio.wait((ending,), timeout=_HURRY_S if at_once.is_set() else None)
        if not ending.done():
            ending.cancel()
        await asyncio.gather(ending, return_exceptions=at_once.is_set())

    async def _start_workers(self) -> None:
        config = self._config
        self._ray = asyncio.ensure_future(asyncio.to_thread(self._connect_ray))
        await asyncio.shield(self._ray)
        self._on_ray_started()
        from cluster.actors import RayMachines

        self._fleet = Fleet(
            self._plan.workers,
            self.membership,
            RayMachines(on_node_address=config.joins_cluster),
            start_timeout_s=config.start_timeout_s,
        )
        await self._fleet.start()
        try:
            async with asyncio.timeout(config.start_timeout_s):
                await self.membership.wait_ready(
                    prefill_workers=config.prefill_workers, decode_workers=config.decode_workers
                )
        except TimeoutError as exc:
            num_ready = sum(status.ready for status in self.membership.workers())
            raise FleetError(
                f"only {num_ready} of {len(self._plan.workers)} workers were ready after {config.start_timeout_s:g} s"
            ) from exc

    def _connect_ray(self) -> None:
        # Imported in this thread as well: it takes half a second.
        from cluster import actors

        actors.connect(self._config.ray_address, self._plan.num_cpus)

    async def _first_request(self) -> None:
        """Through the front door and all the way: what is announced as ready has been seen to work."""
        num_tokens = min(self._config.max_local_prefill_tokens + _FIRST_TOKENS, self._plan.engine.max_model_len // 2)
        payload = {"model": self._config.model_name, "prompt": " a" * num_tokens, "max_tokens": 1, "temperature": 0}
        cert_file = self._config.tls_cert_file
        async with (
            ApiClient(
                self.base_url,
                api_key=self.gateway.api_key,
                tls=None if cert_file is None else trust_only(cert_file),
                timeout_s=self._config.request_timeout_s,
            ) as client,
            client.stream("/v1/completions", payload) as stream,
        ):
            async for _ in stream.chunks:
                pass


def _require_free(host: str, port: int, protocol: str) -> None:
    """Tries a port: one that is in use, or a host that is not ours, shall be known before anything starts."""
    try:
        socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except OSError as exc:
        # Python's own text goes on about what it attempted.
        reason = (exc.strerror or str(exc)).partition(" (while")[0]
        raise OSError(exc.errno, f"cannot listen on port {port} of {host} for {protocol}: {reason}") from exc
