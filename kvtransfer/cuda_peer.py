"""A pool on a GPU that belongs to another process: opened once, proved, and closed with its last user."""

import ctypes
import os
import select
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import ClassVar

from engine.cuda.runtime import CudaError, CudaRuntime
from kvtransfer.cuda_fences import NUM_FENCES, check_fence
from kvtransfer.cuda_handle import HEADER, MAGIC, OFFSET, CudaHandle, gpu_name
from kvtransfer.errors import PoolUnreachable, TransferError
from kvtransfer.handle import PoolHandle

# No step takes so long: the owner's GPU hangs.
_FENCE_TIMEOUT_S = 30.0
_POLL_MS = 1

_ADVICE = "CUDA IPC needs one process namespace and is not to be had on MIG slices or WSL2: `tandem doctor` says more"


class PeerMemory:
    """One peer's pool in this process, however many mappings share it. Opened and closed on one thread.

    A mapping that is let go under a copy lives on beside the one that is made for the next hand-off, and CUDA opens a
    handle once only.
    """

    _opened: ClassVar[dict[tuple[CudaRuntime, PoolHandle], "PeerMemory"]] = {}

    def __init__(self, handle: PoolHandle, cuda: CudaHandle, runtime: CudaRuntime, device: int) -> None:
        self._runtime = runtime
        self._device = device
        self._key = (runtime, handle)
        self._num_users = 0
        self._where = f"the pool of instance {handle.instance_id} (process {cuda.pid}, {gpu_name(cuda.gpu)})"
        if not cuda.memory:
            raise PoolUnreachable(f"{self._where} cannot be mapped: its GPU shares no memory; {_ADVICE}")
        if handle.offset != OFFSET or len(cuda.events) != 1 + NUM_FENCES:
            raise PoolUnreachable(f"{self._where} cannot be mapped: its owner runs another version of Tandem")
        with ExitStack() as undo:
            try:
                # First of all: it is the owner's, and no later process's, if the handle can still be opened after it.
                self.owner_fd = os.pidfd_open(cuda.pid)
            except (OSError, OverflowError) as error:
                raise PoolUnreachable(
                    f"{self._where} cannot be opened: {error}; is it alive, and in this process namespace?"
                ) from error
            undo.callback(os.close, self.owner_fd)
            try:
                self._open(handle, cuda, undo)
            except CudaError as error:
                raise PoolUnreachable(f"{self._where} cannot be mapped: {error}; {_ADVICE}") from error
            self._close = undo.pop_all()

    @classmethod
    def open(cls, handle: PoolHandle, cuda: CudaHandle, runtime: CudaRuntime, device: int) -> "PeerMemory":
        """The pool of `handle`, opened now if it is not, with one user more: `release` it.

        Raises:
            PoolUnreachable: it cannot be read from this process and GPU.
        """
        peer = cls._opened.get((runtime, handle))
        if peer is None:
            peer = cls(handle, cuda, runtime, device)
            cls._opened[peer._key] = peer
        peer._num_users += 1
        return peer

    def release(self) -> None:
        """One user less; closed with the last, after waiting for the device."""
        self._num_users -= 1
        if self._num_users == 0:
            del self._opened[self._key]
            with suppress(CudaError):
                self._runtime.set_device(self._device)
            self._close.close()

    def wait_fence(self, stream: int, fence: int) -> None:
        """Returns when the owner's mark is reached, so that what `stream` is given from now on comes after it.

        The thread waits, not the stream: if the owner is killed, its mark is never reached, and a stream that waits for
        it would hang for ever, and the device with it.

        Raises:
            TransferError: there is no such mark; the owner has died before it; it is not reached in 30 s.
        """
        check_fence(fence)
        event = self._fences[fence]
        try:
            self._runtime.set_device(self._device)  # a thread that has none would open GPU 0
            if self._runtime.event_query(event):
                return
            owner = select.poll()
            owner.register(self.owner_fd, select.POLLIN)
            deadline = time.monotonic() + _FENCE_TIMEOUT_S
            while not self._runtime.event_query(event):
                if owner.poll(_POLL_MS):
                    raise TransferError(f"{self._where} was lost: its owner died before it had filled the blocks")
                if time.monotonic() > deadline:
                    raise TransferError(f"{self._where} was not filled in {_FENCE_TIMEOUT_S:g} s: does its GPU hang?")
        except CudaError as error:
            raise TransferError(f"{self._where} cannot be waited for: {error}") from error

    def _open(self, handle: PoolHandle, cuda: CudaHandle, undo: ExitStack) -> None:
        runtime = self._runtime
        runtime.set_device(self._device)
        self._check_way(cuda.gpu)
        base = runtime.ipc_open_mem_handle(cuda.memory)
        undo.callback(_quietly, runtime.ipc_close_mem_handle, base)
        events = []
        for event_handle in cuda.events:
            events.append(runtime.ipc_open_event_handle(event_handle))
            undo.callback(_quietly, runtime.event_destroy, events[-1])
        birth, *self._fences = events
        self._prove(cuda.nonce, handle.size, base, birth)
        self.pointer = base + OFFSET

    def _check_way(self, gpu: bytes) -> None:
        """A GPU that is not visible here may be reachable all the same: opening will tell."""
        runtime = self._runtime
        for number in range(runtime.device_count()):
            if number == self._device or runtime.device_uuid(number) != gpu:
                continue
            if not runtime.can_access_peer(self._device, number):
                here = gpu_name(runtime.device_uuid(self._device))
                raise PoolUnreachable(
                    f"{self._where} cannot be read from {here}: there is no peer-to-peer access between the two GPUs"
                )

    def _prove(self, nonce: bytes, size: int, base: int, birth: int) -> None:
        """Reads header and trailer as a pull reads blocks: after an event of the owner's, through the mapping."""
        with _a_stream(self._runtime) as stream:
            self._runtime.stream_wait_event(stream, birth)
            header = self._read(base, HEADER.size, stream)
            if HEADER.unpack(header) != (MAGIC, nonce, size):
                raise PoolUnreachable(f"{self._where} is gone: another instance's memory has taken its place")
            if self._read(base + OFFSET + size, len(nonce), stream) != nonce:
                raise PoolUnreachable(f"{self._where} is mapped here, but not to the end of its {size} bytes")

    def _read(self, pointer: int, nbytes: int, stream: int) -> bytes:
        target = (ctypes.c_char * nbytes)()
        self._runtime.memcpy_async(ctypes.addressof(target), pointer, nbytes, stream)
        self._runtime.stream_synchronize(stream)
        return target.raw


@contextmanager
def _a_stream(runtime: CudaRuntime) -> Iterator[int]:
    stream = runtime.stream_create()
    try:
        yield stream
    finally:
        _quietly(runtime.stream_destroy, stream)


def _quietly(give_back: Callable[[int], None], thing: int) -> None:
    """Closing goes on: what fails here fails because the device is lost, and the driver takes all back."""
    with suppress(CudaError):
        give_back(thing)
