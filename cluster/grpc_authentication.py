"""API keys on the gateway's gRPC server: metadata `authorization`, as HTTP's header of that name."""

from typing import Any

import grpc

from cluster.api_keys import REFUSAL, ApiKeys
from cluster.call_context import AUTHORIZATION, first_values
from cluster.grpc_handlers import Context, Continuation, Handler, refuse

# Whoever watches a server's health need not know its keys.
_OPEN = "/grpc.health.v1.Health/"


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


async def _refuse(requests: Any, context: Context) -> None:
    await refuse(context, grpc.StatusCode.UNAUTHENTICATED, REFUSAL)
