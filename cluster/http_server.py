"""An HTTP server inside somebody else's loop, on a port that was bound before."""

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from starlette.types import ASGIApp

from cluster.http_protocol import BoundedHttpProtocol
from cluster.tls import GatewayTls


class HttpServer(uvicorn.Server):
    """Serves `app`; signals are not its business.

    Args:
        tls: None: plain HTTP.
        patience_s: for what is in flight, when it shall end.
    """

    def __init__(self, app: ASGIApp, tls: GatewayTls | None, patience_s: int) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=BoundedHttpProtocol,
                ws="none",
                lifespan="off",
                log_config=None,  # logging belongs to the process
                access_log=False,  # a line of ours is written for each call
                server_header=False,
                timeout_graceful_shutdown=patience_s,
                ssl_certfile=None if tls is None else tls.cert_file,
                ssl_keyfile=None if tls is None else tls.key_file,
            )
        )
        self._has_started = asyncio.Event()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._has_started.set()

    async def wait_started(self, serving: asyncio.Task[None]) -> None:
        """Returns once connections are taken; raises what `serving` failed with."""
        started = asyncio.ensure_future(self._has_started.wait())
        await asyncio.wait((started, serving), return_when=asyncio.FIRST_COMPLETED)
        started.cancel()
        if serving.done():
            await serving


def listen(host: str, port: int) -> socket.socket:
    """A socket that takes connections.

    Raises:
        OSError: the port cannot be had.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With its protocol spelled out, unlike `socket.create_server`: asyncio turns Nagle's algorithm off only for sockets
    # that say they are TCP. Left on, it holds a reply's body back until the client's delayed acknowledgement: 40 ms.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family is socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind((host, port))
        listener.listen()
    except OSError as exc:
        listener.close()
        raise OSError(exc.errno, f"cannot listen on {in_url(host)}:{port}: {exc.strerror}") from exc
    return listener


def in_url(host: str) -> str:
    """A host as it is written before a port."""
    return f"[{host}]" if ":" in host else host
