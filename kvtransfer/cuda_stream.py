"""What copies of blocks need of CUDA: a stream beside the engine's, and host memory that it reads and writes fast."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from engine.cuda.runtime import CudaError, CudaRuntime
from kvtransfer.errors import TransferError

logger = logging.getLogger(__name__)


class SideStream:
    """A stream for the work of one thread, which waits for all of it."""

    def __init__(self, runtime: CudaRuntime, device: int) -> None:
        """
        Raises:
            CudaError: there is no such device.
        """
        self._runtime = runtime
        self._device = device
        runtime.set_device(device)
        self._stream = runtime.stream_create()
        self._is_closed = False

    @contextmanager
    def work(self) -> Iterator[int]:
        """What is given to the stream within is done when this ends, also if giving it failed half-way: nothing of it
        may be in flight any more when blocks go to somebody else.

        Raises:
            TransferError: something went wrong, here or on the device.
        """
        try:
            self._runtime.set_device(self._device)
            try:
                yield self._stream
            finally:
                self._runtime.stream_synchronize(self._stream)
        except RuntimeError as error:  # CudaError, or of a kernel's launch
            raise TransferError(f"copying on GPU {self._device} failed: {error}") from error

    def close(self) -> None:
        """Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            with suppress(CudaError):  # the device is lost, and its streams with it
                self._runtime.set_device(self._device)
                self._runtime.stream_destroy(self._stream)


class PinnedMemory:
    """Host memory registered with CUDA, so that copies run beside the CPU and at the full speed of the link.

    Where it cannot be registered (limits on locked memory, read-only pages on some platforms), copies are right all the
    same, but slower: said once.
    """

    def __init__(
        self, runtime: CudaRuntime, device: int, pointer: int, nbytes: int, *, read_only: bool = False
    ) -> None:
        """`device`: of whose process this is; the memory is registered for all."""
        self._runtime = runtime
        self._device = device
        self._pointer = pointer
        try:
            runtime.set_device(device)
            runtime.host_register(pointer, nbytes, read_only=read_only)
            self.is_pinned = True
        except CudaError as error:
            logger.warning("%d bytes of host memory cannot be pinned, so copies of it are slow: %s", nbytes, error)
            self.is_pinned = False

    def close(self) -> None:
        """Before the memory is unmapped, and not under a copy. Idempotent; on any thread."""
        if self.is_pinned:
            self.is_pinned = False
            with suppress(CudaError):  # the device is lost
                self._runtime.set_device(self._device)
                self._runtime.host_unregister(self._pointer)
