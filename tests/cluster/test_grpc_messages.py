"""Messages that are none: refused as the client's fault, on one line of the log, and others are served."""

import logging
from typing import Any

import grpc
import pytest

from cluster.access_log import write_access_line
from cluster.call_record import CallRecorder
from cluster.grpc_calls import GrpcCalls
from cluster.grpc_messages import GrpcMessages
from fake_generator import FakeGenerator
from generation_api import CHANNEL_OPTIONS, asking, serving
from tandem.v1 import generation_pb2 as pb

CORRUPT = b"\xff\xff\xff"
BAD_TEXT = pb.TokenizeRequest(text="xx").SerializeToString().replace(b"xx", b"\xff\xfe")
GENERATION = "/tandem.v1.Generation"
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"


def call_of(channel: grpc.aio.Channel, method: str, message: bytes) -> Any:
    metadata = (("x-request-id", "r-1"),)
    if method == REFLECTION:
        return channel.stream_stream(method)(iter([message]), metadata=metadata)
    if method.endswith("/Generate"):
        return channel.unary_stream(method)(message, metadata=metadata)
    return channel.unary_unary(method)(message, metadata=metadata)


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (f"{GENERATION}/Generate", CORRUPT),
        (f"{GENERATION}/Tokenize", CORRUPT),
        (f"{GENERATION}/Tokenize", BAD_TEXT),
        (f"{GENERATION}/GetLoads", CORRUPT),
        (REFLECTION, CORRUPT),
    ],
)
async def test_a_message_that_cannot_be_read_is_the_clients_fault(
    method: str, message: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    interceptors = [GrpcCalls(CallRecorder([write_access_line])), GrpcMessages()]
    async with serving(FakeGenerator(), interceptors=interceptors) as served:
        async with grpc.aio.insecure_channel(served.address, options=CHANNEL_OPTIONS) as channel:
            call = call_of(channel, method, message)
            assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert await call.details() == (
                f"the message cannot be read: it is not the protobuf message that {method} takes"
            )
            assert dict(await call.trailing_metadata())["x-request-id"] == "r-1"
        (line,) = [record for record in caplog.records if record.name.startswith("cluster") or record.exc_info]
        assert line.name == "cluster.access_log"
        assert line.exc_info is None
        assert "INVALID_ARGUMENT" in line.getMessage()
        assert [r async for r in served.stub.Generate(asking(max_tokens=3))]


async def test_an_error_of_that_kind_behind_the_door_is_not_the_clients() -> None:
    failing = FakeGenerator(fail=ValueError("a worker's message cannot be read"), fail_after=1)
    async with serving(failing, interceptors=[GrpcMessages()]) as served:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            _ = [r async for r in served.stub.Generate(asking(max_tokens=3))]
        assert caught.value.code() is grpc.StatusCode.INTERNAL
