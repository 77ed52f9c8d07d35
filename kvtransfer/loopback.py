"""Hand-offs within one process: the same machines, ports and copies, without sockets and without a memfd.

`LoopbackTransport` carries the messages, in order and never at once: the event loop runs in between, as with a network.
`LoopbackMemory` is a pool that this process alone can map.
"""

import asyncio
import itertools
from collections.abc import Callable
from typing import ClassVar
from weakref import WeakValueDictionary

from engine.memory import KVLayout, PrivateMemory
from kvtransfer.copier import HostCopies
from kvtransfer.errors import Code, PoolUnreachable
from kvtransfer.events import StreamEnded
from kvtransfer.handle import PoolHandle
from kvtransfer.messages import ConsumerMessage, HolderMessage, Open, Pulled
from kvtransfer.provider import Holding, Provider

KIND = "loopback"

Listener = Callable[[HolderMessage | StreamEnded], None]


class LoopbackMemory:
    """Memory of a pool that is mapped by name, within this process. Implements `ExportedMemory`."""

    _names = itertools.count()
    _open: ClassVar["WeakValueDictionary[bytes, LoopbackMemory]"] = WeakValueDictionary()

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._memory = PrivateMemory(nbytes)
        self._name = b"%d" % next(self._names)
        self._open[self._name] = self

    @property
    def buffer(self) -> memoryview:
        return self._memory.buffer

    @classmethod
    def find(cls, name: bytes) -> "LoopbackMemory | None":
        """The memory of that name, if it is still open."""
        return cls._open.get(name)

    def handle(self, instance_id: str, layout: KVLayout) -> PoolHandle:
        """How it is mapped; valid until `close`."""
        return PoolHandle(instance_id, KIND, self._name, 0, self.nbytes, layout.bytes_per_block, layout.fingerprint)

    def copies(self, layout: KVLayout) -> HostCopies:
        """How peers' blocks are copied into it."""
        return HostCopies(self.buffer, layout.bytes_per_block)

    def close(self) -> None:
        """Takes the name away, and the memory with its last view. Idempotent."""
        self._open.pop(self._name, None)
        self._memory.close()


class LoopbackMapping:
    """Another worker's pool in this process. Implements `mapping.HostMapping`."""

    owner_fd = None

    def __init__(self, handle: PoolHandle) -> None:
        """
        Raises:
            PoolUnreachable: it is closed.
        """
        memory = LoopbackMemory.find(handle.raw)
        if memory is None or (handle.offset, handle.size) != (0, len(memory.buffer)):
            raise PoolUnreachable(f"the pool of instance {handle.instance_id} is gone from this process")
        self.buffer = memory.buffer.toreadonly()

    def close(self) -> None:
        self.buffer = memoryview(b"")


class LoopbackTransport:
    """Reaches the providers of this process by any name that they are entered under."""

    def __init__(self) -> None:
        self.providers: dict[str, Provider] = {}

    def connect(self, address: str, timeout_s: float, listener: Listener) -> "LoopbackStream":
        return LoopbackStream(self.providers.get(address), address, listener)

    async def close(self) -> None:
        """Streams end with their hand-offs; there is nothing else."""


class LoopbackStream:
    """One stream, both ends of it: `ConsumerStream` by `send` and `close`, and for the holder a `_HolderEnd`."""

    def __init__(self, provider: Provider | None, address: str, listener: Listener) -> None:
        self._loop = asyncio.get_running_loop()
        self._provider = provider
        self._address = address
        self._listener = listener
        self._holding: Holding | None = None
        self._has_ended = False

    def send(self, message: ConsumerMessage) -> None:
        self._loop.call_soon(self._to_holder, message)

    def close(self) -> None:
        self._loop.call_soon(self.end, Code.CANCELLED, "the consumer closed the stream")

    def end(self, code: Code, message: str) -> None:
        """Both sides learn that it is over; idempotent."""
        if self._has_ended:
            return
        self._has_ended = True
        self._listener(StreamEnded(code, message))
        if self._holding is not None:
            self._holding.stream_ended(code, message)

    def _to_holder(self, message: ConsumerMessage) -> None:
        if self._has_ended:
            return
        if self._provider is None:
            self.end(Code.UNAVAILABLE, f"nobody is at {self._address}")
            return
        match message:
            case Open():
                self._holding = self._provider.open(message, _HolderEnd(self, self._loop))
            case Pulled():
                assert self._holding is not None, message
                self._holding.pulled(message)

    def to_consumer(self, message: HolderMessage) -> None:
        if not self._has_ended:
            self._listener(message)


class _HolderEnd:
    """The holder's end of a stream."""

    def __init__(self, stream: LoopbackStream, loop: asyncio.AbstractEventLoop) -> None:
        self._stream = stream
        self._loop = loop

    def send(self, message: HolderMessage) -> None:
        self._loop.call_soon(self._stream.to_consumer, message)

    def close(self, code: Code, message: str) -> None:
        self._loop.call_soon(self._stream.end, code, message)
