"""The consumer's end of the stream over gRPC, and the channels to the peers it is opened on."""

import asyncio
from collections.abc import Callable, Coroutine

import grpc

from kvtransfer.channels import CHANNEL_OPTIONS, Options
from kvtransfer.errors import Code
from kvtransfer.events import StreamEnded
from kvtransfer.messages import ConsumerMessage, HolderMessage
from kvtransfer.peer_tls import PeerTls, open_peer_channel
from kvtransfer.wire import request_to_wire, response_from_wire
from tandem.v1 import exchange_pb2, exchange_pb2_grpc

Call = grpc.aio.StreamStreamCall[exchange_pb2.HandoffRequest, exchange_pb2.HandoffResponse]
Listener = Callable[[HolderMessage | StreamEnded], None]

# A channel without streams is kept for the next hand-off so long.
IDLE_S = 60.0

# The stream outlives the hand-off's own deadline a little: then that one speaks, and says what it waited for.
_GRACE_S = 5.0


class GrpcTransport:
    """Reaches holders over gRPC. Implements `puller.Transport`.

    One channel a peer, kept while it is used and for a while after; a peer that could not be reached gets a new one, so
    that no failure outlasts its cause.
    """

    def __init__(
        self, *, idle_s: float = IDLE_S, options: Options = CHANNEL_OPTIONS, tls: PeerTls | None = None
    ) -> None:
        self._idle_s = idle_s
        self._options = options
        self._tls = tls
        self._current: dict[str, _PeerChannel] = {}  # by address, for new streams
        self._channels: set[_PeerChannel] = set()  # all that are open
        self._tasks: set[asyncio.Task[None]] = set()

    def connect(self, address: str, timeout_s: float, listener: Listener) -> "GrpcStream":
        peer = self._current.get(address)
        if peer is None:
            peer = self._current[address] = _PeerChannel(address, self._options, self._tls)
            self._channels.add(peer)
        peer.use()
        stream = GrpcStream(peer.channel, timeout_s, listener)
        self._spawn(self._run(stream, peer))
        return stream

    async def close(self) -> None:
        """Cancels the streams that are left and closes all channels. Idempotent."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        self._current.clear()
        for peer in list(self._channels):
            await self._close(peer)

    async def _run(self, stream: "GrpcStream", peer: "_PeerChannel") -> None:
        try:
            code = await stream.run()
        finally:
            peer.num_streams -= 1
        is_current = self._current.get(peer.address) is peer
        if is_current and code is Code.UNAVAILABLE:
            del self._current[peer.address]
            is_current = False
        if peer.num_streams == 0:
            if is_current:
                peer.call_later(self._idle_s, self._close_idle)
            else:
                await self._close(peer)

    def _close_idle(self, peer: "_PeerChannel") -> None:
        del self._current[peer.address]
        self._spawn(self._close(peer))

    async def _close(self, peer: "_PeerChannel") -> None:
        peer.cancel_timer()
        await peer.channel.close(None)
        self._channels.discard(peer)

    def _spawn(self, coroutine: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class _PeerChannel:
    def __init__(self, address: str, options: Options, tls: PeerTls | None) -> None:
        self.address = address
        self.channel = open_peer_channel(address, options, tls)
        self.num_streams = 0
        self._timer: asyncio.TimerHandle | None = None  # while it is unused

    def use(self) -> None:
        self.num_streams += 1
        self.cancel_timer()

    def call_later(self, delay_s: float, call: "Callable[[_PeerChannel], None]") -> None:
        self._timer = asyncio.get_running_loop().call_later(delay_s, call, self)

    def cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class GrpcStream:
    """One stream. Implements `puller.ConsumerStream`."""

    def __init__(self, channel: grpc.aio.Channel, timeout_s: float, listener: Listener) -> None:
        stub = exchange_pb2_grpc.KvExchangeStub(channel)  # type: ignore[no-untyped-call]
        self._call: Call = stub.Handoff(timeout=timeout_s + _GRACE_S)
        self._listener = listener
        self._outgoing: asyncio.Queue[ConsumerMessage] = asyncio.Queue()
        self._is_closed = False

    def send(self, message: ConsumerMessage) -> None:
        self._outgoing.put_nowait(message)

    def close(self) -> None:
        self._is_closed = True
        self._call.cancel()

    async def run(self) -> Code:
        """Carries messages both ways until the stream has ended; returns how."""
        writer = asyncio.create_task(self._write())
        try:
            ended = await self._read()
        finally:
            self._call.cancel()  # a no-op, unless this task itself is cancelled
            writer.cancel()
            await asyncio.wait([writer])
        self._listener(ended)
        return ended.code

    async def _read(self) -> StreamEnded:
        try:
            while isinstance(response := await self._call.read(), exchange_pb2.HandoffResponse):
                self._listener(response_from_wire(response))
        except grpc.aio.AioRpcError as error:
            return StreamEnded(Code(error.code().value[0]), error.details() or error.code().name)
        except asyncio.CancelledError:
            if not self._is_closed:
                raise
            return StreamEnded(Code.CANCELLED, "closed by the consumer")
        except ValueError as error:
            return StreamEnded(Code.INTERNAL, f"the holder's message makes no sense: {error}")
        return StreamEnded(Code.OK)

    async def _write(self) -> None:
        while True:
            message = await self._outgoing.get()
            try:
                await self._call.write(request_to_wire(message))
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                return  # the stream is gone: reading it says why
