"""Records of gRPC calls of every kind, however they end; and keys on each of them."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from cluster.api_keys import ApiKeys
from cluster.call_record import CallRecord, CallRecorder
from cluster.grpc_authentication import GrpcAuthentication
from cluster.grpc_calls import GrpcCalls
from worker import log

# Never reached unless something hangs.
PATIENCE_S = 60.0
ID = (("x-request-id", "r-1"),)


class Service:
    """Handlers of every kind; each answers with the request id that its logs would have."""

    def handlers(self) -> grpc.GenericRpcHandler:
        return grpc.method_handlers_generic_handler(
            "test.Service",
            {
                "Unary": grpc.unary_unary_rpc_method_handler(self.unary),
                "Stream": grpc.unary_stream_rpc_method_handler(self.stream),
                "Writes": grpc.unary_stream_rpc_method_handler(self.writes),
                "Collects": grpc.stream_unary_rpc_method_handler(self.collects),
                "Both": grpc.stream_stream_rpc_method_handler(self.both),
                "Aborts": grpc.unary_unary_rpc_method_handler(self.aborts),
                "Fails": grpc.unary_unary_rpc_method_handler(self.fails),
                "Hangs": grpc.unary_stream_rpc_method_handler(self.hangs),
                "InAThread": grpc.unary_unary_rpc_method_handler(lambda request, context: request),
            },
        )

    def _id(self) -> bytes:
        return (log.request_id.get() or "").encode()

    async def unary(self, request: bytes, context: Any) -> bytes:
        return self._id()

    async def stream(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        yield self._id()
        yield self._id()

    async def writes(self, request: bytes, context: Any) -> None:
        await context.write(self._id())

    async def collects(self, requests: AsyncIterator[bytes], context: Any) -> bytes:
        return b"".join([request async for request in requests])

    async def both(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        async for _ in requests:
            yield self._id()

    async def aborts(self, request: bytes, context: Any) -> bytes:
        await context.abort(grpc.StatusCode.OUT_OF_RANGE, "as the test says")
        raise AssertionError("abort raises")

    async def fails(self, request: bytes, context: Any) -> bytes:
        raise KeyError("x")

    async def hangs(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        yield self._id()
        await asyncio.Event().wait()


@asynccontextmanager
async def serving(keys: ApiKeys | None = None) -> AsyncIterator[tuple[grpc.aio.Channel, "asyncio.Queue[CallRecord]"]]:
    ended: asyncio.Queue[CallRecord] = asyncio.Queue()
    doors = [] if keys is None else [GrpcAuthentication(keys)]
    server = grpc.aio.server(interceptors=[GrpcCalls(CallRecorder([ended.put_nowait])), *doors])
    server.add_generic_rpc_handlers((Service().handlers(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        options = (("grpc.enable_http_proxy", 0),)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:
            yield channel, ended
    finally:
        await server.stop(None)


async def record(ended: "asyncio.Queue[CallRecord]") -> CallRecord:
    return await asyncio.wait_for(ended.get(), PATIENCE_S)


async def requests() -> AsyncIterator[bytes]:
    yield b"a"
    yield b"b"


async def test_calls_of_every_kind_are_served_and_recorded_with_their_id() -> None:
    async with serving() as (channel, ended):
        assert await channel.unary_unary("/test.Service/Unary")(b"", metadata=ID) == b"r-1"
        streamed = channel.unary_stream("/test.Service/Stream")(b"", metadata=ID)
        assert [r async for r in streamed] == [b"r-1", b"r-1"]
        assert [r async for r in channel.unary_stream("/test.Service/Writes")(b"", metadata=ID)] == [b"r-1"]
        assert await channel.stream_unary("/test.Service/Collects")(requests(), metadata=ID) == b"ab"
        both = channel.stream_stream("/test.Service/Both")(requests(), metadata=ID)
        assert [r async for r in both] == [b"r-1", b"r-1"]
        records = [await record(ended) for _ in range(5)]
    assert [r.path.rpartition("/")[2] for r in records] == ["Unary", "Stream", "Writes", "Collects", "Both"]
    assert {(r.transport, r.status, r.client_gone, r.error, r.context.request_id) for r in records} == {
        ("grpc", "OK", False, None, "r-1")
    }


async def test_ends_are_told_as_the_client_is_told_them() -> None:
    async with serving() as (channel, ended):
        for method, code, error in (
            ("Aborts", grpc.StatusCode.OUT_OF_RANGE, type(None)),
            ("Fails", grpc.StatusCode.UNKNOWN, KeyError),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await channel.unary_unary(f"/test.Service/{method}")(b"")
            told = await record(ended)
            assert (caught.value.code(), told.status, type(told.error)) == (code, code.name, error)


async def test_client_that_leaves_is_told_of_as_gone() -> None:
    async with serving() as (channel, ended):
        call = channel.unary_stream("/test.Service/Hangs")(b"", metadata=ID)
        assert await call.read() == b"r-1"
        call.cancel()
        told = await record(ended)
    assert (told.status, told.client_gone) == ("CANCELLED", True)


async def test_methods_that_are_not_ours_go_their_way() -> None:
    async with serving() as (channel, ended):
        assert await channel.unary_unary("/test.Service/InAThread")(b"x") == b"x"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary("/test.Service/Missing")(b"")
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
        assert ended.empty()


async def test_refusal_of_a_call_without_a_key_is_recorded_whatever_its_kind() -> None:
    async with serving(ApiKeys(["sesame"])) as (channel, ended):
        calls = {
            "Unary": channel.unary_unary("/test.Service/Unary")(b""),
            "Stream": channel.unary_stream("/test.Service/Stream")(b""),
            "Collects": channel.stream_unary("/test.Service/Collects")(),  # says nothing, and does not end
            "Both": channel.stream_stream("/test.Service/Both")(),
            "Missing": channel.unary_unary("/test.Service/Missing")(b""),
        }
        for method, call in calls.items():
            code = await asyncio.wait_for(call.code(), PATIENCE_S)
            told = await record(ended)
            assert (code, told.status) == (grpc.StatusCode.UNAUTHENTICATED, "UNAUTHENTICATED"), method
        metadata = (("authorization", "Bearer sesame"), *ID)
        assert await channel.unary_unary("/test.Service/Unary")(b"", metadata=metadata) == b"r-1"
