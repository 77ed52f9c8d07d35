"""API keys on the gateway's gRPC server: metadata `authorization`, as HTTP's header of that name."""

from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

import grpc

from cluster.api_keys import REFUSAL, ApiKeys
from cluster.call_context import AUTHORIZATION, REQUEST_ID, call_context, first_values
from cluster.call_record import current_call

# Whoever watches a server's health need not know its keys.
_OPEN = "/grpc.health.v1.Health/"

# Not generic at run time, unlike in its stubs.
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Continuation: TypeAlias = Callable[[grpc.HandlerCallDetails], Awaitable[Handler]]


class GrpcAuthentication(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Refuses calls without a key, before a message of theirs is read; all but the health service, reflection too."""

    def __init__(self, keys: ApiKeys) -> None:
        self._keys = keys

    async def intercept_service(self, continuation: Continuation, handler_call_details: Any) -> Handler:
        if handler_call_details.method.startswith(_OPEN):
            return await continuation(handler_call_details)
        given = first_values(handler_call_details.invocation_metadata or (), (AUTHORIZATION,))
        if self._keys.accept(given.get(AUTHORIZATION)):
            return await continuation(handler_call_details)
        # Whatever the call's kind: this one reads nothing, and so waits for nothing.
        return grpc.stream_stream_rpc_method_handler(_refuse)


async def _refuse(requests: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
    record = current_call.get()
    call = call_context(context.invocation_metadata() or ()) if record is None else record.context
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, REFUSAL, ((REQUEST_ID, call.request_id),))
