"""A pool in a GPU's memory, that another process reads through a mapping of its own (CUDA IPC).

    owner                                                    peer
    cudaMalloc, zeroed; header and trailer written           opens the memory's handle, once, and the events'
    events made, all at once: birth, and a ring of fences    its stream waits for the birth event, then reads header and
    birth recorded after the writes                          trailer through the mapping: are they the right ones?
    each step that is not waited for: next fence recorded    waits for the fence that an announcement names, then reads

    | header, 4 KiB: magic, nonce, size | pool, from `pointer` on | nonce | … up to a multiple of 2 MiB |

The mapping is proved before anything is read for real: the nonce says that it is this start of this worker (process
ids, and CUDA's handles, come to name other things), the trailer that the whole pool is there, the event that the
owner's events are seen here. What this cannot prove in passing is that an event which is *not* reached holds a reader
back; `make test-gpu` proves it, with a kernel that is late. Whatever fails is `PoolUnreachable`, and the consumer asks
for copies in host memory instead: seen, counted, never silently slow.

Within one process there is nothing to open (CUDA refuses a process's own handle): the mapping is the memory itself.

Life: CUDA calls it undefined to free memory that a peer still has mapped, and peers keep it mapped until they see the
owner's process end. So the owner closes its hand-offs before its pool: nobody is confirmed any more, and what a copy
in flight still reads is thrown away. Drivers keep such memory until its last mapping is gone, as after a kill. When the
owner is killed, what is mapped stays readable, until the peer notices and closes.
"""

import ctypes
import os
import secrets
import threading
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import WeakValueDictionary

from engine.cuda.runtime import CudaError, CudaRuntime, cuda_runtime
from engine.memory import KVLayout
from kvtransfer.cuda_fences import FenceRing
from kvtransfer.cuda_handle import HEADER, MAGIC, OFFSET, CudaHandle, gpu_name
from kvtransfer.cuda_peer import PeerMemory
from kvtransfer.errors import PoolUnreachable
from kvtransfer.handle import PoolHandle

if TYPE_CHECKING:
    from kvtransfer.cuda_copies import CudaCopies

KIND = "cuda_ipc"

# A handle shares the whole of what the driver manages as one piece: a pool shares it with nobody.
_GRANULE = 2 << 20


class CudaIpcMemory:
    """Memory of a pool on one GPU that other processes of this host can map. Implements `ExportedMemory` and
    `DeviceMemory`."""

    _here: ClassVar["WeakValueDictionary[bytes, CudaIpcMemory]"] = WeakValueDictionary()  # by nonce, oldest first

    def __init__(self, nbytes: int, device: int, runtime: CudaRuntime | None = None) -> None:
        """Allocates `nbytes`, zeroed, on the GPU of that number in this process, and makes it current.

        A GPU that shares no memory (`export_error` says why) still gives a pool: handles of it cannot be mapped.

        Raises:
            ValueError: nbytes is not above 0.
            CudaError: the GPU is not there, or has not that much.
        """
        if nbytes <= 0:
            raise ValueError(f"a pool has at least one byte, not {nbytes}")
        self.nbytes = nbytes
        self.device = device
        self.runtime = runtime or cuda_runtime()
        self.export_error: CudaError | None = None
        self._nonce = secrets.token_bytes(16)
        self._lock = threading.Lock()
        self._num_users = 1  # its owner, and mappings within this process
        self._is_closed = False
        self.runtime.set_device(device)
        self.uuid = self.runtime.device_uuid(device)
        with ExitStack() as undo:
            self._base = self._allocate()
            undo.callback(self.runtime.free, self._base)
            self._make_fences(undo)
            self.runtime.event_record(self._fences.birth, 0)
            self.runtime.stream_synchronize(0)
            undo.pop_all()
        self._here[self._nonce] = self

    @classmethod
    def of_this_process(cls) -> "CudaIpcMemory | None":
        """The one made last, of those that are not closed."""
        return next(iter(reversed(list(cls._here.values()))), None)

    @classmethod
    def find(cls, nonce: bytes, runtime: CudaRuntime) -> "CudaIpcMemory | None":
        """The one with this nonce, if it is of this process and not closed."""
        memory = cls._here.get(nonce)
        return memory if memory is not None and memory.runtime is runtime else None

    @property
    def pointer(self) -> int:
        """Address of block 0 in this process; at least 256-byte aligned."""
        return self._base + OFFSET

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """[nbytes] bytes: the pool, without a copy."""
        assert not self._is_closed, "a pool is used after it was closed"
        return {"shape": (self.nbytes,), "typestr": "|u1", "data": (self.pointer, False), "strides": None, "version": 3}

    def record_fence(self, stream: int) -> int:
        """Marks what `stream` has been given so far: work of this device, on one thread. The mark is a number below
        `NUM_FENCES`, used again in turn."""
        return self._fences.record(stream)

    def wait_fence(self, stream: int, fence: int) -> None:
        """What `stream` is given from now on comes after the mark.

        Raises:
            TransferError: there is no such mark.
        """
        self._fences.wait(stream, fence)

    def wait_own_fence(self, stream: int) -> None:
        """What `stream` is given from now on comes after all that has been marked.

        Whoever writes blocks that the engine has let go of waits for this: steps that still read them may be in flight.
        """
        self._fences.wait_latest(stream)

    def handle(self, instance_id: str, layout: KVLayout) -> PoolHandle:
        """How peers map it; valid until `close`."""
        cuda = CudaHandle(os.getpid(), self.uuid, self._nonce, self._memory_handle, self._event_handles)
        return PoolHandle(
            instance_id, KIND, cuda.pack(), OFFSET, self.nbytes, layout.bytes_per_block, layout.fingerprint
        )

    def copies(self, layout: KVLayout) -> "CudaCopies":
        """How peers' blocks are copied into it."""
        from kvtransfer.cuda_copies import CudaCopies

        return CudaCopies(self, layout.bytes_per_block)

    def retain(self) -> None:
        """A mapping in this process: the memory stays until it is released, also if its owner closes it."""
        with self._lock:
            self._num_users += 1

    def release(self) -> None:
        """That mapping is gone."""
        with self._lock:
            self._num_users -= 1
            if self._num_users > 0:
                return
        with suppress(CudaError):  # the device is lost, and its memory with it
            self.runtime.set_device(self.device)
            self._fences.close()
            self.runtime.free(self._base)

    def close(self) -> None:
        """Takes it from peers to come, and frees it, after waiting for the device. Idempotent.

        Peers must have stopped reading: the owner has closed its hand-offs before (see above).
        """
        self._here.pop(self._nonce, None)
        if not self._is_closed:
            self._is_closed = True
            self.release()

    def _allocate(self) -> int:
        """Address of the allocation, written to but for the pool's blocks."""
        runtime = self.runtime
        size = -(-(OFFSET + self.nbytes + len(self._nonce)) // _GRANULE) * _GRANULE
        try:
            base = runtime.malloc(size)
        except CudaError as error:
            free, total = runtime.mem_info()
            where = f"{gpu_name(self.uuid)}, where {free} of {total} are free"
            raise CudaError(error.name, f"no room for a pool of {size} bytes on {where}: {error}") from error
        try:
            runtime.memset(base, 0, size)
            self._write(base, HEADER.pack(MAGIC, self._nonce, self.nbytes))
            self._write(base + OFFSET + self.nbytes, self._nonce)
        except BaseException:
            runtime.free(base)
            raise
        return base

    def _write(self, pointer: int, data: bytes) -> None:
        source = ctypes.create_string_buffer(data, len(data))
        self.runtime.memcpy(pointer, ctypes.addressof(source), len(data))

    def _make_fences(self, undo: ExitStack) -> None:
        """Events and handles for peers; events for this process alone where the GPU gives no others."""
        runtime = self.runtime
        try:
            with ExitStack() as undo_export:
                self._fences = FenceRing(runtime, interprocess=True)
                undo_export.callback(self._fences.close)
                self._memory_handle = runtime.ipc_get_mem_handle(self._base)
                self._event_handles = tuple(runtime.ipc_get_event_handle(event) for event in self._fences.events)
                undo_export.pop_all()
        except CudaError as error:
            self.export_error = error
            self._memory_handle, self._event_handles = b"", ()
            self._fences = FenceRing(runtime, interprocess=False)
        undo.callback(self._fences.close)


class CudaIpcMapping:
    """A peer's pool on a GPU, readable from the GPU of this process's own pool. Implements `mapping.PoolMapping`."""

    def __init__(self, handle: PoolHandle, runtime: CudaRuntime | None = None, device: int | None = None) -> None:
        """Opens and proves it. Milliseconds, once a peer; `device` becomes current.

        Args:
            runtime, device: the reader's; None: those of this process's own pool, into which it copies.

        Raises:
            PoolUnreachable: it cannot be read from that GPU; the message says why, and what to do.
        """
        if runtime is None or device is None:
            own = CudaIpcMemory.of_this_process()
            if own is None:
                raise PoolUnreachable(
                    f"the pool of instance {handle.instance_id} is on a GPU, and this process has no pool on one"
                )
            runtime, device = own.runtime, own.device
        try:
            cuda = CudaHandle.unpack(handle.raw)
        except ValueError as error:
            raise PoolUnreachable(f"the pool of instance {handle.instance_id} cannot be mapped: {error}") from error
        local = CudaIpcMemory.find(cuda.nonce, runtime)
        self._source: CudaIpcMemory | PeerMemory | None
        if local is None:
            self._source = peer = PeerMemory.open(handle, cuda, runtime, device)
            self.owner_fd: int | None = peer.owner_fd
        else:
            _check_local(handle, local, device)
            local.retain()
            self._source, self.owner_fd = local, None  # it cannot die alone

    @property
    def pointer(self) -> int:
        """Address of block 0 in this process: for kernels and copies of the reader's device, not to be wrapped as a
        tensor."""
        assert self._source is not None, "a mapping is read after it was closed"
        return self._source.pointer

    def wait_fence(self, stream: int, fence: int) -> None:
        """What `stream` is given from now on comes after the owner's mark. May keep the calling thread waiting.

        Raises:
            TransferError: there is no such mark, or it was not reached: the owner has died, or its GPU hangs.
        """
        assert self._source is not None, "a mapping is waited for after it was closed"
        self._source.wait_fence(stream, fence)

    def close(self) -> None:
        """Unmaps it, after waiting for the device. Idempotent; never under a copy."""
        source, self._source, self.owner_fd = self._source, None, None
        if source is not None:
            source.release()


def _check_local(handle: PoolHandle, memory: CudaIpcMemory, device: int) -> None:
    if memory.device != device:
        raise PoolUnreachable(
            f"the pool of instance {handle.instance_id} is of this process but on another GPU: give each GPU a process "
            "of its own"
        )
    if (handle.offset, handle.size) != (OFFSET, memory.nbytes):
        raise PoolUnreachable(f"the pool of instance {handle.instance_id} has {memory.nbytes} bytes, not {handle.size}")
