"""The outermost layer of the gateway's gRPC server: every call is recorded, as every request over HTTP is."""

import asyncio
import inspect
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import quote

import grpc

from cluster.call_context import call_context
from cluster.call_record import CallRecord, CallRecorder
from cluster.grpc_handlers import Behaviour, Context, Continuation, Handler, behaviour_of, with_behaviour

_NAMES: dict[int, str] = {code.value[0]: code.name for code in grpc.StatusCode}


class GrpcCalls(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Records calls of methods that there are; to stand before all other interceptors."""

    def __init__(self, calls: CallRecorder) -> None:
        self._calls = calls

    async def intercept_service(self, continuation: Continuation, handler_call_details: Any) -> Handler:
        handler = await continuation(handler_call_details)
        if handler is None:
            return handler  # UNIMPLEMENTED
        behaviour = behaviour_of(handler)
        path = quote(handler_call_details.method)
        recorded: Behaviour
        if inspect.isasyncgenfunction(behaviour):

            async def recorded(request: Any, context: Context) -> AsyncIterator[Any]:
                with self._call(context, path):
                    async for response in behaviour(request, context):
                        yield response

        elif inspect.iscoroutinefunction(behaviour):

            async def recorded(request: Any, context: Context) -> Any:
                with self._call(context, path):
                    return await behaviour(request, context)

        else:
            return handler  # runs in a thread: none of ours
        return with_behaviour(handler, recorded, handler.request_deserializer)

    @contextmanager
    def _call(self, context: Context, path: str) -> Iterator[None]:
        caller = call_context(context.invocation_metadata() or ())
        with self._calls.call(caller, "grpc", "POST", path) as record, _status(record, context):
            yield


@contextmanager
def _status(record: CallRecord, context: Context) -> Iterator[None]:
    """How the call ends: as gRPC will tell it."""
    try:
        yield
    except (asyncio.CancelledError, GeneratorExit):
        left = context.time_remaining()
        record.status = "DEADLINE_EXCEEDED" if left is not None and left <= 0 else "CANCELLED"
        record.client_gone = True
        raise
    except grpc.aio.AbortError:
        record.status = _code(context)
        raise
    except Exception as exc:
        record.status = "UNKNOWN"
        record.error = record.error or exc
        raise
    record.status = _code(context)


def _code(context: Context) -> str:
    code = context.code()  # a number, unlike in the stubs; None: not set
    return _NAMES.get(code, "UNKNOWN") if isinstance(code, int) else code.name if code is not None else "OK"
