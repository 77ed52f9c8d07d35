"""Hand-offs between two processes that are joined by a pipe: the machines of `kvtransfer`, without a network.

The bare interpreter that the script must run on may lack protobuf; a pipe carries the same messages as they are.
"""

import asyncio
import itertools
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection

from kvtransfer.errors import Code
from kvtransfer.events import StreamEnded
from kvtransfer.messages import ConsumerMessage, HolderMessage, Open
from kvtransfer.provider import Holding, Provider

Listener = Callable[[HolderMessage | StreamEnded], None]

# What crosses: a stream's number, and what is said on it.
_CLOSE = "close"
_END = (-1, "end")  # no stream: the consumer is gone


class _Pipe:
    """One end: what arrives is heard on the event loop."""

    def __init__(self, connection: Connection, heard: Callable[[int, object], None]) -> None:
        self._connection = connection
        self._loop = asyncio.get_running_loop()
        self._heard = heard
        self._thread = threading.Thread(target=self._listen, name="pipe", daemon=True)
        self._thread.start()

    def send(self, stream: int, message: object) -> None:
        self._connection.send((stream, message))

    def _listen(self) -> None:
        try:
            while True:
                stream, message = self._connection.recv()
                self._tell(stream, message)
        except (EOFError, OSError):
            self._tell(*_END)

    def _tell(self, stream: int, message: object) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody listens any more
            self._loop.call_soon_threadsafe(self._heard, stream, message)


class PipeTransport:
    """The consumer's end. Implements `kvtransfer.puller.Transport`; there is one holder, whatever the address."""

    def __init__(self, connection: Connection) -> None:
        self._pipe = _Pipe(connection, self._hear)
        self._numbers = itertools.count()
        self._listeners: dict[int, Listener] = {}

    def connect(self, address: str, timeout_s: float, listener: Listener) -> "_ConsumerEnd":
        number = next(self._numbers)
        self._listeners[number] = listener
        return _ConsumerEnd(self._pipe, number)

    async def close(self) -> None:
        """Tells the holder that nobody will come any more."""
        self._pipe.send(*_END)

    def _hear(self, stream: int, message: object) -> None:
        if (stream, message) == _END:
            for listener in self._listeners.values():
                listener(StreamEnded(Code.UNAVAILABLE, "the holder is gone"))
            self._listeners.clear()
            return
        assert isinstance(message, HolderMessage | StreamEnded), message
        if isinstance(message, StreamEnded):
            self._listeners.pop(stream)(message)
        else:
            self._listeners[stream](message)


class _ConsumerEnd:
    def __init__(self, pipe: _Pipe, number: int) -> None:
        self._pipe = pipe
        self._number = number

    def send(self, message: ConsumerMessage) -> None:
        self._pipe.send(self._number, message)

    def close(self) -> None:
        self._pipe.send(self._number, _CLOSE)


class PipeServer:
    """The holder's end: streams that arrive are hand-offs of `provider`."""

    def __init__(self, connection: Connection, provider: Provider) -> None:
        self._pipe = _Pipe(connection, self._hear)
        self._provider = provider
        self._holdings: dict[int, Holding] = {}
        self._ended = asyncio.Event()

    async def serve(self) -> None:
        """Until the consumer has closed its transport, or is gone."""
        await self._ended.wait()

    def _hear(self, stream: int, message: object) -> None:
        if (stream, message) == _END:
            self._ended.set()
        elif isinstance(message, Open):
            self._holdings[stream] = self._provider.open(message, _HolderEnd(self._pipe, stream))
        elif message == _CLOSE:
            self._holdings[stream].stream_ended(Code.CANCELLED, "the consumer closed the stream")
        else:
            self._holdings[stream].pulled(message)  # type: ignore[arg-type]


class _HolderEnd:
    def __init__(self, pipe: _Pipe, number: int) -> None:
        self._pipe = pipe
        self._number = number

    def send(self, message: HolderMessage) -> None:
        self._pipe.send(self._number, message)

    def close(self, code: Code, message: str) -> None:
        self._pipe.send(self._number, StreamEnded(code, message))
