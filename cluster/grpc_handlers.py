"""What gRPC calls for a method, seen from interceptors that put something around it."""

from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

import grpc

from cluster.call_context import REQUEST_ID, call_context
from cluster.call_record import current_call

Context = grpc.aio.ServicerContext[Any, Any]
# An RpcMethodHandler, or None where there is no such method; its stubs know neither that nor its fields' types.
Handler: TypeAlias = Any
Continuation: TypeAlias = Callable[[grpc.HandlerCallDetails], Awaitable[Handler]]
Behaviour: TypeAlias = Callable[[Any, Context], Any]


async def refuse(context: Context, code: grpc.StatusCode, message: str) -> None:
    """Ends a call before its handler has begun: the trailers have its id all the same."""
    record = current_call.get()
    call = call_context(context.invocation_metadata() or ()) if record is None else record.context
    await context.abort(code, message, ((REQUEST_ID, call.request_id),))


_MAKERS: dict[tuple[bool, bool], Callable[..., Any]] = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}


def behaviour_of(handler: Handler) -> Behaviour:
    """The function behind a handler, of whichever kind."""
    behaviour: Behaviour = handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
    return behaviour


def with_behaviour(handler: Handler, behaviour: Behaviour, request_deserializer: Any) -> Handler:
    """A handler of the same kind with another function behind it.

    Args:
        request_deserializer: None: the function takes bytes.
    """
    make = _MAKERS[handler.request_streaming, handler.response_streaming]
    return make(behaviour, request_deserializer, handler.response_serializer)
