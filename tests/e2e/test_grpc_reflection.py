"""grpcurl against a real gateway: it knows nothing of our protocol but what reflection tells it."""

import json
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, json_format, message_factory
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from gateway_thread import Endpoint

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

SERVICE = "tandem.v1.Generation"


class ReflectedClient:
    """Calls methods with JSON, as grpcurl does."""

    def __init__(self, channel: grpc.Channel, metadata: dict[str, str]) -> None:
        self._channel = channel
        self._metadata = tuple(metadata.items())
        self._reflection = reflection_pb2_grpc.ServerReflectionStub(channel)  # type: ignore[no-untyped-call]
        self._pool = descriptor_pool.DescriptorPool()
        self._known: set[str] = set()

    def services(self) -> set[str]:
        reply = self._ask(list_services="")
        return {service.name for service in reply.list_services_response.service}

    def call(self, method: str, request: dict[str, Any]) -> list[dict[str, Any]]:
        """All replies."""
        self._learn(self._ask(file_containing_symbol=SERVICE))
        described = self._pool.FindServiceByName(SERVICE).FindMethodByName(method)
        sent = json_format.ParseDict(request, message_factory.GetMessageClass(described.input_type)())
        make = self._channel.unary_stream if described.server_streaming else self._channel.unary_unary
        call = make(
            f"/{SERVICE}/{method}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=message_factory.GetMessageClass(described.output_type).FromString,
        )(sent, timeout=60, metadata=self._metadata)
        replies = list(call) if described.server_streaming else [call]
        return [json.loads(json_format.MessageToJson(reply, preserving_proto_field_name=True)) for reply in replies]

    def _ask(self, **question: str) -> Any:
        (reply,) = self._reflection.ServerReflectionInfo(
            iter([reflection_pb2.ServerReflectionRequest(**question)]), metadata=self._metadata
        )
        return reply

    def _learn(self, reply: Any) -> None:
        files = [
            descriptor_pb2.FileDescriptorProto.FromString(f)
            for f in reply.file_descriptor_response.file_descriptor_proto
        ]
        for file in files:
            if file.name in self._known:
                continue
            self._known.add(file.name)
            for dependency in file.dependency:
                self._learn(self._ask(file_by_filename=dependency))
            self._pool.Add(file)


@pytest.fixture
def client(endpoint: Endpoint) -> Iterator[ReflectedClient]:
    options = (("grpc.enable_http_proxy", 0),)
    with grpc.insecure_channel(endpoint.grpc_address, options=options) as channel:
        yield ReflectedClient(channel, endpoint.authorization)


def test_text_is_generated_by_a_client_that_was_told_everything_by_reflection(client: ReflectedClient) -> None:
    assert {SERVICE, "grpc.health.v1.Health"} <= client.services()
    request = {"text": "The capital of France is", "sampling_params": {"max_tokens": 8, "temperature": 0}}
    (reply,) = client.call("Generate", request)
    text = reply["complete"]["text"]
    assert "Paris" in text
    chunks = client.call("Generate", request | {"stream": True})
    assert "".join(chunk["chunk"].get("text", "") for chunk in chunks if "chunk" in chunk) == text
    assert len(chunks) > 2
