"""The holder's end of the stream over gRPC: `KvExchange`."""

import asyncio

import grpc

from kvtransfer.errors import Code
from kvtransfer.events import CloseStream, Failed
from kvtransfer.messages import HolderMessage, Open, Pulled
from kvtransfer.provider import Holding, Provider
from kvtransfer.wire import request_from_wire, response_to_wire
from tandem.v1 import exchange_pb2, exchange_pb2_grpc

Context = grpc.aio.ServicerContext[exchange_pb2.HandoffRequest, exchange_pb2.HandoffResponse]

STATUS = {status.value[0]: status for status in grpc.StatusCode}


class KvExchangeService(exchange_pb2_grpc.KvExchangeServicer):
    """Serves a provider's hand-offs. A stream's end, however it comes, ends its hand-off."""

    def __init__(self, provider: Provider) -> None:
        self._provider = provider

    async def Handoff(self, request_iterator: object, context: Context) -> None:
        """One hand-off: reads and writes go on side by side until the holder has closed, or the stream is gone."""
        stream = _Outgoing()
        holding = self._provider.open(await self._read_open(context), stream)
        reader = asyncio.create_task(_read(context, holding, stream))
        try:
            while not isinstance(said := await stream.next(), CloseStream):
                await context.write(response_to_wire(said))
        finally:
            # Cancelled, broken, or over: a no-op if the holder has ended by itself.
            holding.stream_ended(Code.CANCELLED, "the stream to the consumer is gone")
            reader.cancel()
            await asyncio.wait([reader])
        if not reader.cancelled():
            reader.result()
        if said.code is not Code.OK:
            await context.abort(STATUS[said.code], said.message)

    async def _read_open(self, context: Context) -> Open:
        try:
            async with asyncio.timeout(self._provider.times.answer_s):
                request = await context.read()
        except TimeoutError:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "a hand-off begins with Open, and none has come")
        if not isinstance(request, exchange_pb2.HandoffRequest):
            await context.abort(grpc.StatusCode.CANCELLED, "the stream ended before Open")
        try:
            message = request_from_wire(request)
        except ValueError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        if not isinstance(message, Open):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"a hand-off begins with Open, not {message}")
        return message


async def _read(context: Context, holding: Holding, stream: "_Outgoing") -> None:
    """Gives the holder what the consumer says, until that ends."""
    try:
        while isinstance(request := await context.read(), exchange_pb2.HandoffRequest):
            message = request_from_wire(request)
            if not isinstance(message, Pulled):
                raise ValueError("a second Open")
            holding.pulled(message)
    except ValueError as error:
        holding.post(Failed(Code.INVALID_ARGUMENT, str(error)))
    finally:
        # However reading ended, nobody is left to be confirmed. What the holder has closed already stays as it is.
        holding.stream_ended(Code.CANCELLED, "the consumer ended the stream")
        stream.close(Code.CANCELLED, "the consumer ended the stream")


class _Outgoing:
    """What the holder says, in order. Implements `provider.HolderStream`."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[HolderMessage | CloseStream] = asyncio.Queue()

    def send(self, message: HolderMessage) -> None:
        self._queue.put_nowait(message)

    def close(self, code: Code, message: str) -> None:
        self._queue.put_nowait(CloseStream(code, message))

    async def next(self) -> HolderMessage | CloseStream:
        return await self._queue.get()
