"""A machine with GPUs that is only played: several processes of it inside one, each a `CudaRuntime`.

It enforces CUDA's rules, and is as unkind as they allow:

- Work given to a stream is done as late as possible: when somebody waits for it, or for what comes after it. So whoever
  forgets to wait really reads what was there before.
- Memory from `malloc` holds garbage, and freed memory other garbage.
- Addresses, streams and events of one process mean nothing in another.
- A call that CUDA forbids raises `CudaError` with CUDA's own name. What it leaves undefined is done, and noted in
  `FakeMachine.undefined`.

Names of errors: cudaIpcOpenMemHandle of a process's own handle gives cudaErrorDeviceUninitialized ("invalid device
context"). Drivers differ about a handle that is open already (older: refused; newer: counted): here it is refused.
"""

import ctypes
import functools
import itertools
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Concatenate, ParamSpec, TypeVar

from engine.cuda.runtime import CudaError
from kvtransfer import mapping
from kvtransfer.cuda_ipc import CudaIpcMapping
from kvtransfer.handle import PoolHandle

# No host address is so high.
_DEVICE_ADDRESSES = 1 << 60
_GRANULE = 2 << 20

P = ParamSpec("P")
R = TypeVar("R")


class StuckError(AssertionError):
    """Something waits for work that is never done: its process was killed."""


@dataclass(eq=False)
class Allocation:
    """A piece of one GPU's memory."""

    gpu: int
    owner: "FakeProcess"
    data: bytearray
    is_freed: bool = False  # by its owner; mappings keep it
    mapped_by: set["FakeProcess"] = field(default_factory=set)


@dataclass(eq=False)
class Mark:
    """What an event stands for since it was recorded: a place in a stream."""

    stream: "Stream"
    is_done: bool = False


@dataclass(eq=False)
class Event:
    """Shared by all processes that have opened it."""

    gpu: int
    owner: "FakeProcess"
    interprocess: bool
    mark: Mark | None = None
    is_destroyed: bool = False  # by its owner


@dataclass(eq=False)
class Stream:
    """Work in its order: functions, marks to be reached, and marks of streams to wait for."""

    process: "FakeProcess"
    gpu: int
    work: deque[Callable[[], None] | Mark] = field(default_factory=deque)

    def step(self) -> bool:
        """Does one piece of work, of this stream or of one that it waits for; False: there is none that can be done."""
        if not self.work:
            return False
        first = self.work[0]
        if isinstance(first, Mark):
            if first.stream is not self and not first.is_done:
                return first.stream.step()
            first.is_done = True
            self.work.popleft()
        else:
            self.work.popleft()
            first()
        return True

    def run(self, mark: Mark | None = None) -> None:
        """Until the mark is reached; None: until there is nothing left."""
        while self.work if mark is None else not mark.is_done:
            if not self.step():
                raise StuckError("a wait for work of a process that was killed")


class FakeMachine:
    """GPUs, and the processes that use them."""

    def __init__(self, gpus: int = 1, *, p2p: bool = True, memory: int = 1 << 30, shares_memory: bool = True) -> None:
        """
        Args:
            p2p: each GPU can read each other's memory.
            memory: bytes of each GPU.
            shares_memory: False: CUDA IPC is not supported, as under WSL2.
        """
        self.lock = threading.RLock()
        self.uuids = [b"fake GPU %7d" % gpu for gpu in range(gpus)]
        self.p2p = p2p
        self.memory = memory
        self.shares_memory = shares_memory
        self.processes: list[FakeProcess] = []
        self.allocations: set[Allocation] = set()
        self.handles: dict[bytes, Allocation | Event] = {}
        self.undefined: list[str] = []

    def process(self, visible: Sequence[int] | None = None, pid: int | None = None) -> "FakeProcess":
        """A process that sees these GPUs (all), in this order. `pid`: of a real process that dies when it does."""
        process = FakeProcess(self, list(range(len(self.uuids)) if visible is None else visible), pid or os.getpid())
        self.processes.append(process)
        return process

    def used(self, gpu: int) -> int:
        """Bytes that are not free."""
        return sum(len(allocation.data) for allocation in self.allocations if allocation.gpu == gpu)

    def new_handle(self, thing: Allocation | Event) -> bytes:
        handle = b"%-16d" % len(self.handles) + os.urandom(48)
        self.handles[handle] = thing
        return handle

    def settle(self, allocation: Allocation) -> None:
        """Takes memory back that nobody has any more."""
        if allocation.is_freed and not allocation.mapped_by:
            self.allocations.discard(allocation)

    def assert_nothing_left(self) -> None:
        """Nothing undefined was done, and every process has given back all that it had."""
        assert self.undefined == [], self.undefined
        held = {process.name: process.held() for process in self.processes if process.held()}
        assert held == {}, held
        assert self.allocations == set(), self.allocations


def call(
    method: "Callable[Concatenate[FakeProcess, P], R]",
) -> "Callable[Concatenate[FakeProcess, P], R]":
    """A call of CUDA: fails if a test wants it to, or if the process is dead; one at a time on the machine."""

    @functools.wraps(method)
    def wrapped(process: "FakeProcess", /, *args: P.args, **kwargs: P.kwargs) -> R:
        with process.machine.lock:
            process.check_call(method.__name__)
            return method(process, *args, **kwargs)

    return wrapped


class FakeProcess:
    """One process's CUDA. Implements `CudaRuntime`."""

    def __init__(self, machine: FakeMachine, visible: list[int], pid: int) -> None:
        self.machine = machine
        self.pid = pid
        self.name = f"process {len(machine.processes)}"
        self.is_dead = False
        self._visible = visible
        self._failures: dict[str, list[str | None]] = {}
        self._thread = threading.local()
        self._numbers = itertools.count(1)
        self._next_address = _DEVICE_ADDRESSES + (len(machine.processes) << 50)
        self._own: dict[int, Allocation] = {}  # by address
        self._mapped: dict[int, Allocation] = {}
        self._events: dict[int, Event] = {}
        self._streams: dict[int, Stream] = {}
        self._default_streams: dict[int, Stream] = {}  # by GPU
        self._destroyed_streams: list[Stream] = []
        self._registered: dict[int, int] = {}  # host memory: address, bytes

    # --- for tests

    def fail(self, method: str, name: str = "cudaErrorUnknown", *, after: int = 0) -> None:
        """A call of `method` to come raises this error, `after` so many that work."""
        self._failures[method] = [None] * after + [name]

    def kill(self) -> None:
        """SIGKILL: its memory is gone but for what others have mapped; work in flight is never finished."""
        with self.machine.lock:
            self.is_dead = True
            for stream in self._all_streams():
                stream.work.clear()
            for allocation in self._mapped.values():
                allocation.mapped_by.discard(self)
                self.machine.settle(allocation)
            for allocation in self._own.values():
                allocation.is_freed = True
                self.machine.settle(allocation)
            for kept in (self._own, self._mapped, self._events, self._streams, self._registered):
                kept.clear()

    def held(self) -> dict[str, int]:
        """How many things of each sort it has not given back."""
        counts = {
            "allocations": len(self._own),
            "mappings": len(self._mapped),
            "events": len(self._events),
            "streams": len(self._streams),
            "registered": len(self._registered),
        }
        return {sort: count for sort, count in counts.items() if count}

    def view(self, pointer: int, nbytes: int) -> memoryview:
        """Device memory as it is now: writable, or read-only if it is another process's (ours is only to read it)."""
        for regions in (self._own, self._mapped):
            for base, allocation in regions.items():
                if base <= pointer and pointer + nbytes <= base + len(allocation.data):
                    data = memoryview(allocation.data)[pointer - base : pointer - base + nbytes]
                    return data if regions is self._own else data.toreadonly()
        raise CudaError("cudaErrorInvalidValue", f"{self.name} has no device memory [{pointer:#x}, +{nbytes})")

    @call
    def launch(self, stream: int, function: Callable[[], None]) -> None:
        """A kernel: `function` is called when the stream comes to it."""
        self._stream(stream).work.append(functools.partial(self._run_kernel, function))

    def check_call(self, method: str) -> None:
        if self.is_dead:
            raise CudaError("cudaErrorContextIsDestroyed", f"{method}: {self.name} was killed")
        failures = self._failures.get(method)
        name = failures.pop(0) if failures else None
        if name is not None:
            raise CudaError(name, f"{method}: {name}: as the test wants it")

    # --- devices

    @call
    def device_count(self) -> int:
        return len(self._visible)

    @call
    def set_device(self, device: int) -> None:
        self._gpu(device)
        self._thread.device = device

    @call
    def device_uuid(self, device: int) -> bytes:
        return self.machine.uuids[self._gpu(device)]

    @call
    def can_access_peer(self, device: int, peer: int) -> bool:
        return self._gpu(device) != self._gpu(peer) and self.machine.p2p

    @call
    def mem_info(self) -> tuple[int, int]:
        return self.machine.memory - self.machine.used(self._current_gpu()), self.machine.memory

    # --- memory

    @call
    def malloc(self, nbytes: int) -> int:
        gpu = self._current_gpu()
        if nbytes > self.machine.memory - self.machine.used(gpu):
            raise CudaError("cudaErrorMemoryAllocation", "cudaErrorMemoryAllocation: out of memory")
        allocation = Allocation(gpu, self, bytearray(b"\xa5") * nbytes)
        self.machine.allocations.add(allocation)
        return self._place(self._own, allocation)

    @call
    def free(self, pointer: int) -> None:
        allocation = self._take(self._own, pointer)
        self._synchronize_device(allocation.gpu)
        del self._own[pointer]
        for process in allocation.mapped_by:
            self.machine.undefined.append(f"{self.name} freed memory that {process.name} has mapped")
        allocation.is_freed = True
        allocation.data[:] = b"\xdd" * len(allocation.data)
        self.machine.settle(allocation)

    @call
    def memset(self, pointer: int, value: int, nbytes: int) -> None:
        self._stream(0).run()
        self.view(pointer, nbytes)[:] = bytes([value]) * nbytes

    @call
    def memcpy(self, target: int, source: int, nbytes: int) -> None:
        self._stream(0).run()
        self._copy(target, source, nbytes)

    @call
    def memcpy_async(self, target: int, source: int, nbytes: int, stream: int) -> None:
        queue = self._stream(stream)
        hosts = [pointer for pointer in (target, source) if not self._is_device_memory(pointer, nbytes)]
        is_pinned = all(self._is_registered(pointer, nbytes) for pointer in hosts)

        def copy() -> None:
            if is_pinned and not all(self._is_registered(pointer, nbytes) for pointer in hosts):
                raise CudaError("cudaErrorIllegalAddress", "host memory was unregistered under a copy")
            self._copy(target, source, nbytes)

        queue.work.append(functools.partial(self._run_kernel, copy))
        if not is_pinned:
            queue.run()

    @call
    def host_register(self, pointer: int, nbytes: int, *, read_only: bool = False) -> None:
        if not read_only and not _is_writable(pointer):
            raise CudaError("cudaErrorInvalidValue", f"{pointer:#x} is mapped read-only")
        if pointer in self._registered:
            raise CudaError("cudaErrorHostMemoryAlreadyRegistered", f"{pointer:#x} is registered already")
        self._registered[pointer] = nbytes

    @call
    def host_unregister(self, pointer: int) -> None:
        if self._registered.pop(pointer, None) is None:
            raise CudaError("cudaErrorHostMemoryNotRegistered", f"{pointer:#x} is not registered")

    # --- streams and events

    @call
    def stream_create(self) -> int:
        number = next(self._numbers)
        self._streams[number] = Stream(self, self._current_gpu())
        return number

    @call
    def stream_synchronize(self, stream: int) -> None:
        self._stream(stream).run()

    @call
    def stream_destroy(self, stream: int) -> None:
        """Its work is still done, at some time."""
        self._destroyed_streams.append(self._stream(stream))
        del self._streams[stream]

    @call
    def event_create(self, *, interprocess: bool = False) -> int:
        if interprocess and not self.machine.shares_memory:
            raise CudaError("cudaErrorNotSupported", "event_create: cudaErrorNotSupported: operation not supported")
        return self._new_event(Event(self._current_gpu(), self, interprocess))

    @call
    def event_record(self, event: int, stream: int) -> None:
        recorded, queue = self._event(event), self._stream(stream)
        if recorded.gpu != queue.gpu:
            raise CudaError("cudaErrorInvalidResourceHandle", "an event of one device is recorded on another's stream")
        recorded.mark = Mark(queue)
        queue.work.append(recorded.mark)

    @call
    def event_query(self, event: int) -> bool:
        """Time passes while somebody asks: one piece of the work is done."""
        mark = self._event(event).mark
        if mark is not None and not mark.is_done:
            mark.stream.step()
        return mark is None or mark.is_done

    @call
    def event_synchronize(self, event: int) -> None:
        mark = self._event(event).mark
        if mark is not None:
            mark.stream.run(mark)

    @call
    def stream_wait_event(self, stream: int, event: int) -> None:
        queue, mark = self._stream(stream), self._event(event).mark
        if mark is not None and mark.stream is not queue:
            queue.work.append(mark)

    @call
    def event_destroy(self, event: int) -> None:
        destroyed = self._events.pop(event, None)
        if destroyed is None:
            raise CudaError("cudaErrorInvalidResourceHandle", f"{self.name} has no event {event}")
        if destroyed.owner is self:
            destroyed.is_destroyed = True

    # --- between processes

    @call
    def ipc_get_mem_handle(self, pointer: int) -> bytes:
        if not self.machine.shares_memory:
            raise CudaError("cudaErrorNotSupported", "ipc_get_mem_handle: cudaErrorNotSupported: not supported")
        return self.machine.new_handle(self._take(self._own, pointer))

    @call
    def ipc_open_mem_handle(self, handle: bytes) -> int:
        allocation = self.machine.handles.get(handle)
        if not isinstance(allocation, Allocation) or allocation.is_freed:
            raise CudaError("cudaErrorInvalidResourceHandle", "ipc_open_mem_handle: invalid resource handle")
        if allocation.owner is self:
            raise CudaError("cudaErrorDeviceUninitialized", "ipc_open_mem_handle: invalid device context")
        if self in allocation.mapped_by:
            raise CudaError("cudaErrorAlreadyMapped", "ipc_open_mem_handle: it is open here already")
        if allocation.gpu != self._current_gpu() and not self.machine.p2p:
            raise CudaError("cudaErrorPeerAccessUnsupported", "ipc_open_mem_handle: no access between these devices")
        allocation.mapped_by.add(self)
        return self._place(self._mapped, allocation)

    @call
    def ipc_close_mem_handle(self, pointer: int) -> None:
        allocation = self._take(self._mapped, pointer)
        self._synchronize_device(self._current_gpu())
        del self._mapped[pointer]
        allocation.mapped_by.discard(self)
        self.machine.settle(allocation)

    @call
    def ipc_get_event_handle(self, event: int) -> bytes:
        shared = self._event(event)
        if not shared.interprocess or shared.owner is not self:
            raise CudaError("cudaErrorInvalidResourceHandle", "ipc_get_event_handle: not an interprocess event")
        return self.machine.new_handle(shared)

    @call
    def ipc_open_event_handle(self, handle: bytes) -> int:
        shared = self.machine.handles.get(handle)
        if not isinstance(shared, Event) or shared.is_destroyed or shared.owner.is_dead:
            raise CudaError("cudaErrorInvalidResourceHandle", "ipc_open_event_handle: invalid resource handle")
        if shared.owner is self:
            raise CudaError("cudaErrorDeviceUninitialized", "ipc_open_event_handle: invalid device context")
        return self._new_event(shared)

    # --- inside

    def _gpu(self, device: int) -> int:
        """Which of the machine's GPUs this process calls `device`."""
        if not 0 <= device < len(self._visible):
            raise CudaError("cudaErrorInvalidDevice", f"device {device} of {len(self._visible)}")
        return self._visible[device]

    def _current_gpu(self) -> int:
        return self._gpu(getattr(self._thread, "device", 0))

    def _place(self, regions: dict[int, Allocation], allocation: Allocation) -> int:
        """An address for it, far from others."""
        address = self._next_address
        self._next_address += (len(allocation.data) // _GRANULE + 2) * _GRANULE
        regions[address] = allocation
        return address

    def _take(self, regions: dict[int, Allocation], pointer: int) -> Allocation:
        if pointer not in regions:
            raise CudaError("cudaErrorInvalidValue", f"{pointer:#x} is no such address of {self.name}")
        return regions[pointer]

    def _memory(self, pointer: int, nbytes: int) -> memoryview | ctypes.Array[ctypes.c_char]:
        if pointer >= _DEVICE_ADDRESSES:
            return self.view(pointer, nbytes)
        return (ctypes.c_char * nbytes).from_address(pointer)

    def _copy(self, target: int, source: int, nbytes: int) -> None:
        memoryview(self._memory(target, nbytes)).cast("B")[:] = memoryview(self._memory(source, nbytes)).cast("B")

    def _is_device_memory(self, pointer: int, nbytes: int) -> bool:
        """Raises `CudaError` if it is neither of a device's nor of the host."""
        if pointer < _DEVICE_ADDRESSES:
            return False
        self.view(pointer, nbytes)
        return True

    def _is_registered(self, pointer: int, nbytes: int) -> bool:
        return any(start <= pointer and pointer + nbytes <= start + n for start, n in self._registered.items())

    def _run_kernel(self, function: Callable[[], None]) -> None:
        try:
            function()
        except CudaError as error:
            self.machine.undefined.append(f"work of {self.name}: {error}")
            raise CudaError("cudaErrorIllegalAddress", f"an illegal memory access: {error}") from error

    def _stream(self, stream: int) -> Stream:
        if stream == 0:
            gpu = self._current_gpu()
            return self._default_streams.setdefault(gpu, Stream(self, gpu))
        if stream not in self._streams:
            raise CudaError("cudaErrorInvalidResourceHandle", f"{self.name} has no stream {stream}")
        return self._streams[stream]

    def _all_streams(self) -> list[Stream]:
        return [*self._streams.values(), *self._default_streams.values(), *self._destroyed_streams]

    def _synchronize_device(self, gpu: int) -> None:
        for stream in self._all_streams():
            if stream.gpu == gpu:
                stream.run()

    def _new_event(self, event: Event) -> int:
        number = next(self._numbers)
        self._events[number] = event
        return number

    def _event(self, event: int) -> Event:
        if event not in self._events:
            raise CudaError("cudaErrorInvalidResourceHandle", f"{self.name} has no event {event}")
        found = self._events[event]
        if found.is_destroyed:
            self.machine.undefined.append(f"{self.name} uses an event that {found.owner.name} has destroyed")
        return found


def _is_writable(pointer: int) -> bool:
    """Of this machine's real memory."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            addresses, rights = line.split()[:2]
            start, end = (int(address, 16) for address in addresses.split("-"))
            if start <= pointer < end:
                return "w" in rights
    return False


_importer: dict[str, Any] = {}


def open_as_importer(handle: PoolHandle) -> CudaIpcMapping:
    """What `open_mapping` calls within `importing`."""
    return CudaIpcMapping(handle, **_importer)


@contextmanager
def importing(process: FakeProcess, device: int = 0) -> Iterator[None]:
    """Within it, this test's process maps handles as `process` would, for its GPU of that number."""
    before = mapping.MAPPINGS["cuda_ipc"], dict(_importer)
    mapping.MAPPINGS["cuda_ipc"] = f"{__name__}:{open_as_importer.__name__}"
    _importer.update(runtime=process, device=device)
    try:
        yield
    finally:
        mapping.MAPPINGS["cuda_ipc"] = before[0]
        _importer.clear()
        _importer.update(before[1])
