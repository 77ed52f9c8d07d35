"""The innermost layer of the gateway's gRPC server: it reads messages, so that one which is none is the client's fault.

gRPC itself answers it with UNKNOWN, the words of a Python exception and a traceback in the log, before any handler
could say otherwise.
"""

import inspect
from collections.abc import AsyncIterable, AsyncIterator, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from cluster.grpc_handlers import Behaviour, Context, Continuation, Handler, behaviour_of, refuse, with_behaviour


class _Unreadable(Exception):
    """A message is not the one that the method takes."""


class GrpcMessages(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Refuses a message that is not the one its method takes: `INVALID_ARGUMENT`."""

    async def intercept_service(self, continuation: Continuation, handler_call_details: Any) -> Handler:
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_deserializer is None:
            return handler
        behaviour, method = behaviour_of(handler), handler_call_details.method
        parse, read = handler.request_deserializer, _read_all if handler.request_streaming else _read
        reading: Behaviour
        if inspect.isasyncgenfunction(behaviour):

            async def reading(request: Any, context: Context) -> AsyncIterator[Any]:
                try:
                    async for response in behaviour(read(parse, request), context):
                        yield response
                except _Unreadable:
                    await _refuse(method, context)

        elif inspect.iscoroutinefunction(behaviour):

            async def reading(request: Any, context: Context) -> Any:
                try:
                    return await behaviour(read(parse, request), context)
                except _Unreadable:
                    await _refuse(method, context)

        else:
            return handler  # runs in a thread: none of ours
        return with_behaviour(handler, reading, None)


def _read(parse: Callable[[bytes], Any], message: bytes) -> Any:
    try:
        return parse(message)
    except (DecodeError, ValueError) as exc:
        raise _Unreadable from exc


async def _read_all(parse: Callable[[bytes], Any], messages: AsyncIterable[bytes]) -> AsyncIterator[Any]:
    async for message in messages:
        yield _read(parse, message)


async def _refuse(method: str, context: Context) -> None:
    message = f"the message cannot be read: it is not the protobuf message that {method} takes"
    await refuse(context, grpc.StatusCode.INVALID_ARGUMENT, message)
