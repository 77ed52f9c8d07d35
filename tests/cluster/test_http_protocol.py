"""The HTTP server's protocol, fed with bytes: what is no request, and heads without measure."""

import asyncio
import json
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from cluster.http_protocol import MAX_HEAD_BYTES, BoundedHttpProtocol

BODY_HEAD = b"POST /echo HTTP/1.1\r\nhost: x\r\n"


class Transport(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.is_closed = False

    def write(self, data: Any) -> None:
        self.written += bytes(data)

    def close(self) -> None:
        self.is_closed = True

    def is_closing(self) -> bool:
        return self.is_closed

    def pause_reading(self) -> None:
        """Nothing is read: bytes are fed."""

    def resume_reading(self) -> None:
        """Nothing is read: bytes are fed."""


class Connection:
    """A client's end; the application behind the other one answers with the number of bytes in the body."""

    def __init__(self) -> None:
        self.transport = Transport()
        self._state = ServerState()
        config = uvicorn.Config(self._echo, interface="asgi3", lifespan="off", log_config=None, ws="none")
        self._protocol = BoundedHttpProtocol(config, self._state, {})
        self._protocol.connection_made(self.transport)
        self.may_end = asyncio.Event()

    async def _echo(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/slow":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await self.may_end.wait()
        num_bytes, message = 0, {"more_body": True}
        while message.get("more_body"):
            message = await receive()
            num_bytes += len(message.get("body", b""))
        if scope["path"] != "/slow":
            await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"%d bytes" % num_bytes})

    def feed(self, data: bytes, *, pieces: int | None = None) -> None:
        """In pieces of so many bytes, as far as the connection is open; None: in one."""
        for start in range(0, len(data), pieces or len(data)):
            if not self.transport.is_closed:
                self._protocol.data_received(data[start : start + (pieces or len(data))])

    async def answers(self) -> bytes:
        """All that was written, once what has begun is over."""
        self.may_end.set()
        await asyncio.gather(*self._state.tasks)
        return self.transport.written

    async def close(self) -> None:
        self._protocol.connection_lost(None)
        await self.answers()
        self._protocol._unset_keepalive_if_required()


def refusal(written: bytes, status: bytes) -> dict[str, Any]:
    head, _, body = written.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 " + status), written
    assert b"\r\nconnection: close\r\n" in head
    assert b"\r\nx-request-id: " in head
    assert b"content-length: %d\r\n" % len(body) in head
    error: dict[str, Any] = json.loads(body)["error"]
    assert error["type"] == "invalid_request_error"
    return error


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"\x16\x03\x01\x00\xa5\x01",
        b"hello\r\n\r\n",
        b"GET /echo HTTP/9.9\r\n\r\n",
        b"GET http://x HTTP/1.1\r\nhost: x\r\n\r\n",
        b"CONNECT x:80 HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET /echo HTTP/1.1\r\nbad header: 1\r\n\r\n",
        BODY_HEAD + b"content-length: -1\r\n\r\n",
        BODY_HEAD + b"content-length: 1\r\ncontent-length: 2\r\n\r\n",
        BODY_HEAD + b"content-length: 1\r\ntransfer-encoding: chunked\r\n\r\n",
    ],
)
async def test_what_is_no_request_is_answered_by_an_error_object(request_bytes: bytes) -> None:
    connection = Connection()
    connection.feed(request_bytes)
    assert connection.transport.is_closed
    assert refusal(await connection.answers(), b"400 Bad Request\r\n")["code"] == "malformed_request"


async def test_a_malformed_chunk_is_refused_under_the_clients_own_id() -> None:
    connection = Connection()
    connection.feed(BODY_HEAD + b"x-request-id: mine\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n")
    await asyncio.sleep(0)
    connection.feed(b"zz\r\n")
    assert connection.transport.is_closed
    assert refusal(connection.transport.written, b"400 ")["code"] == "malformed_request"
    assert b"\r\nx-request-id: mine\r\n" in connection.transport.written
    await connection.close()


async def test_garbage_behind_a_request_does_not_get_into_its_reply() -> None:
    connection = Connection()
    connection.feed(b"GET /slow HTTP/1.1\r\nhost: x\r\n\r\n")
    while not connection.transport.written:
        await asyncio.sleep(0)
    connection.feed(b"\x00\x01garbage\r\n\r\n")
    assert connection.transport.is_closed
    assert b"malformed" not in connection.transport.written
    await connection.close()


async def test_a_request_for_another_protocol_is_answered_in_this_one() -> None:
    connection = Connection()
    connection.feed(b"GET /echo HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n")
    assert (await connection.answers()).startswith(b"HTTP/1.1 200 OK\r\n")
    await connection.close()


def head_of(num_bytes: int, *, num_headers: int = 1) -> bytes:
    """A request whose path, names and values have so many bytes."""
    head, left = b"GET /echo HTTP/1.1\r\n", num_bytes - len("/echo")
    for index in range(num_headers):
        size = left // (num_headers - index)
        head, left = head + b"x: " + b"a" * (size - 1) + b"\r\n", left - size
    return head + b"\r\n"


@pytest.mark.parametrize("pieces", [None, 1000, 65536])
@pytest.mark.parametrize("num_headers", [1, 100])
async def test_a_head_is_bounded_however_it_comes(pieces: int | None, num_headers: int) -> None:
    large = Connection()
    large.feed(head_of(MAX_HEAD_BYTES + 1, num_headers=num_headers), pieces=pieces)
    assert large.transport.is_closed
    assert refusal(await large.answers(), b"431 Request Header Fields Too Large\r\n")["code"] == "headers_too_large"

    allowed = Connection()
    size = MAX_HEAD_BYTES - 1000 if pieces else MAX_HEAD_BYTES  # in pieces the bytes between headers count as well
    allowed.feed(head_of(size, num_headers=num_headers), pieces=pieces)
    assert (await allowed.answers()).startswith(b"HTTP/1.1 200 OK\r\n")
    await allowed.close()


@pytest.mark.parametrize(
    "endless",
    [
        b"GET /" + b"a" * 200_000,
        b"GET /echo HTTP/1.1\r\nx: " + b"a" * 200_000,
        b"GET /echo HTTP/1.1\r\n" + b"x: y\r\n" * 40_000,
        BODY_HEAD + b"transfer-encoding: chunked\r\n\r\n0\r\nx: " + b"a" * 200_000,
        BODY_HEAD + b"transfer-encoding: chunked\r\n\r\n0\r\n" + b"x: y\r\n" * 40_000,
    ],
    ids=["url", "header", "headers", "trailer", "trailers"],
)
async def test_what_has_no_end_is_refused_before_it_fills_the_memory(endless: bytes) -> None:
    connection = Connection()
    connection.feed(endless, pieces=5000)
    assert connection.transport.is_closed
    assert refusal(connection.transport.written, b"431 ")["code"] == "headers_too_large"
    await connection.close()


@pytest.mark.parametrize("pieces", [None, 10_000])
async def test_bodies_and_further_requests_do_not_count_as_heads(pieces: int | None) -> None:
    connection = Connection()
    for _ in range(3):
        before = len(connection.transport.written)
        connection.feed(
            BODY_HEAD + b"x: " + b"a" * 40_000 + b"\r\ncontent-length: 300000\r\n\r\n" + b"b" * 300_000, pieces=pieces
        )
        assert b"300000 bytes" in (await connection.answers())[before:]
    await connection.close()
