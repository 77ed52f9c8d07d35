"""The gateway: one process, one event loop, two front doors.

A gateway's life: its ports are bound, so that one in use is known at once; the tokenizer loads while the workers are
waited for; then HTTP and gRPC open together, over the same text generation. At the end both take nothing new, let what
is in flight end within a set time, and close. Workers come and go through the `Membership`, which belongs to whoever
made it.
"""

import asyncio
import math
import socket
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from cluster.access_log import write_access_line
from cluster.api_keys import ApiKeys, read_api_keys
from cluster.call_record import CallRecorder
from cluster.config import ClusterConfig
from cluster.grpc_authentication import GrpcAuthentication
from cluster.grpc_calls import GrpcCalls
from cluster.grpc_messages import GrpcMessages
from cluster.http_server import HttpServer, in_url, listen
from cluster.membership import Membership
from cluster.metrics import GatewayMetrics
from cluster.openai.app import create_app
from cluster.openai.server import ApiServer
from cluster.request_run import RunLimits
from cluster.routed_generator import RoutedGenerator
from cluster.scrape import ClusterScrape
from cluster.service import GenerationService
from cluster.text.chat_template import ChatTemplate
from cluster.text_generator import TextGenerator
from cluster.tls import gateway_tls
from cluster.tracing import open_tracer
from engine.model.locate import resolve_model
from engine.tokenizer.tokenizer import Tokenizer
from tandem.v1 import generation_pb2, generation_pb2_grpc

_SERVICE = generation_pb2.DESCRIPTOR.services_by_name["Generation"].full_name


class Gateway:
    """Serves the model of a `Membership`'s workers over HTTP and gRPC.

    `http_port` and `grpc_port` are known once `start` has returned.

    Raises:
        ConfigError: a file of keys or certificates is no good, or traces cannot be sent.
    """

    def __init__(self, config: ClusterConfig, membership: Membership) -> None:
        self._config = config
        limits = RunLimits(
            max_repairs=config.max_repairs,
            max_resubmissions=config.max_repairs,
            timeout_s=config.request_timeout_s,
        )
        self.generator = RoutedGenerator(membership, limits, max_concurrent=config.max_concurrent_requests)
        api_keys = read_api_keys(config)
        # One that is taken, for whoever runs the gateway; None: it takes everybody.
        self.api_key = api_keys[0] if api_keys else None
        self._api_keys = ApiKeys(api_keys) if api_keys else None
        self._tls = gateway_tls(config)
        self._tracer = open_tracer(config)
        sinks = [write_access_line] if self._tracer is None else [write_access_line, self._tracer.record]
        self._calls = CallRecorder(sinks)
        self.http_port = 0
        self.grpc_port = 0
        self._scrape: ClusterScrape | None = None
        self._http: HttpServer | None = None
        self._http_task: asyncio.Task[None] | None = None
        self._grpc: grpc.aio.Server | None = None
        self._health: Any = None  # the package has no types

    @property
    def base_url(self) -> str:
        """Of the HTTP API."""
        scheme = "http" if self._tls is None else "https"
        return f"{scheme}://{in_url(self._config.host)}:{self.http_port}"

    async def start(self) -> None:
        """Returns when requests can be served: a decode worker is ready, and both front doors are open.

        Raises:
            OSError: a port cannot be had.
            FileNotFoundError, ValueError: the model has no tokenizer that can be read.
        """
        listener = listen(self._config.host, self._config.port)
        try:
            loading = asyncio.to_thread(_load_text, resolve_model(self._config.model))
            (tokenizer, template), _ = await asyncio.gather(loading, self.generator.wait_ready())
            await self._open(listener, tokenizer, template)
        except BaseException:
            listener.close()
            raise

    async def _open(self, listener: socket.socket, tokenizer: Tokenizer, template: ChatTemplate | None) -> None:
        version = metadata.version("tandem-serve")
        metrics = GatewayMetrics(
            self.generator.model.served_model_name,
            stats=lambda: self.generator.stats,
            workers=self.generator.workers,
        )
        self._scrape = ClusterScrape(metrics.registry)
        text = TextGenerator(self.generator, tokenizer, metrics, clock=time.monotonic)
        await self._open_grpc(GenerationService(text, version=version, clock=time.monotonic, chat_template=template))
        server = ApiServer(
            text=text,
            scrape=self._scrape,
            version=version,
            created=int(time.time()),
            chat_template=template,
            max_body_bytes=self._config.max_body_bytes,
            api_keys=self._api_keys,
            allowed_origins=self._config.allowed_origins,
            calls=self._calls,
        )
        self._http = HttpServer(create_app(server), self._tls, math.ceil(self._config.shutdown_timeout_s))
        self._http_task = asyncio.create_task(self._http.serve([listener]), name="http")
        await self._http.wait_started(self._http_task)
        self.http_port = listener.getsockname()[1]

    async def _open_grpc(self, service: GenerationService) -> None:
        doors = [] if self._api_keys is None else [GrpcAuthentication(self._api_keys)]
        server = grpc.aio.server(
            interceptors=[GrpcCalls(self._calls), *doors, GrpcMessages()],
            options=(
                ("grpc.max_receive_message_length", self._config.max_body_bytes),
                ("grpc.max_send_message_length", -1),
                ("grpc.so_reuseport", 0),  # a port in use is an error, not a port shared
            ),
        )
        generation_pb2_grpc.add_GenerationServicer_to_server(service, server)  # type: ignore[no-untyped-call]
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        reflection.enable_server_reflection((_SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
        address = f"{in_url(self._config.host)}:{self._config.grpc_listen_port}"
        try:
            if self._tls is None:
                self.grpc_port = server.add_insecure_port(address)
            else:
                self.grpc_port = server.add_secure_port(address, self._tls.grpc_credentials())
        except RuntimeError as exc:
            raise OSError(f"cannot listen on {address} for gRPC: {exc}") from exc
        await server.start()
        self._grpc = server
        for name in ("", _SERVICE):
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)

    async def stop(self) -> None:
        """Takes nothing new, lets requests in flight end within `shutdown_timeout_s`, closes. Idempotent."""
        http_task, self._http_task = self._http_task, None
        grpc_server, self._grpc = self._grpc, None
        if self._health is not None:
            await self._health.enter_graceful_shutdown()
        if self._http is not None:
            self._http.should_exit = True
        if grpc_server is not None:
            await grpc_server.stop(self._config.shutdown_timeout_s)
        if http_task is not None:
            await http_task
        if self._scrape is not None:
            await self._scrape.close()
        if self._tracer is not None:
            await asyncio.to_thread(self._tracer.close)


def _load_text(path: Path) -> tuple[Tokenizer, ChatTemplate | None]:
    tokenizer = Tokenizer.load(path)
    source = tokenizer.chat_template
    return tokenizer, ChatTemplate(source, tokenizer.special.names) if source is not None else None
