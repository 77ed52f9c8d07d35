"""A client that knows nothing but a server's address, as grpcurl: what there is to call, reflection tells it.

No generated code is used: services, methods and messages are built from what the server says, and requests and
responses are JSON.
"""

import json
import shlex
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import grpc
from google.protobuf import json_format
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase


class ReflectiveClient:
    """A blocking client. `with`."""

    def __init__(self, address: str) -> None:
        options = (("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1))
        self._channel = grpc.insecure_channel(address, options=options)
        self._database = ProtoReflectionDescriptorDatabase(self._channel)
        # A pool of its own: the default one knows this project's messages already.
        self._pool = DescriptorPool(self._database)
        self.trailers: dict[str, str] = {}  # of the last call

    def __enter__(self) -> "ReflectiveClient":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._channel.close()

    def services(self) -> list[str]:
        """`grpcurl ADDRESS list`."""
        return sorted(self._database.get_services())

    def describe(self, service: str) -> ServiceDescriptor:
        """`grpcurl ADDRESS describe SERVICE`."""
        return self._pool.FindServiceByName(service)

    def call(
        self, path: str, request: str = "{}", *, headers: Sequence[tuple[str, str]] = (), timeout: float = 60
    ) -> list[dict[str, Any]]:
        """`grpcurl -d REQUEST ADDRESS SERVICE/METHOD`: the responses, as JSON.

        Raises:
            json_format.ParseError: the request is not what the method takes.
            grpc.RpcError: the server's status.
        """
        service, _, name = path.partition("/")
        method: MethodDescriptor = self.describe(service).methods_by_name[name]
        message = json_format.Parse(request, GetMessageClass(method.input_type)(), descriptor_pool=self._pool)
        assert not method.client_streaming, "no method here is"
        kind = self._channel.unary_stream if method.server_streaming else self._channel.unary_unary
        callable_ = kind(
            f"/{path}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=GetMessageClass(method.output_type).FromString,
        )
        if method.server_streaming:
            call = callable_(message, metadata=headers, timeout=timeout)
            responses = list(call)
        else:
            response, call = callable_.with_call(message, metadata=headers, timeout=timeout)
            responses = [response]
        self.trailers = dict(call.trailing_metadata() or ())
        return [
            json_format.MessageToDict(response, preserving_proto_field_name=True, descriptor_pool=self._pool)
            for response in responses
        ]

    def run(self, command: str) -> list[dict[str, Any]]:
        """A command line of grpcurl: its address is not looked at."""
        words = shlex.split(command.replace("\\\n", " "))
        assert words.pop(0) == "grpcurl", command
        headers: list[tuple[str, str]] = []
        request, timeout = "{}", 60.0
        places: list[str] = []
        while words:
            match word := words.pop(0):
                case "-plaintext":
                    pass
                case "-d":
                    request = words.pop(0)
                case "-max-time":
                    timeout = float(words.pop(0))
                case "-H":
                    key, _, value = words.pop(0).partition(":")
                    headers.append((key.strip().lower(), value.strip()))
                case _:
                    assert not word.startswith("-"), f"{word} in {command}"
                    places.append(word)
        match places:
            case [_, "list"]:
                return [{"service": name} for name in self.services()]
            case [_, "describe", service]:
                return [{"method": method.name} for method in self.describe(service).methods]
            case [_, path]:
                json.loads(request)  # what a shell makes of it must be JSON
                return self.call(path, request, headers=headers, timeout=timeout)
        raise AssertionError(f"what is to be called by {command!r}?")
