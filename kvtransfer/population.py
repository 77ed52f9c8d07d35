"""A pool's pages, brought in before they are needed.

Memory is given page by page at its first touch, and that costs ten times as much as the copy that touches it: a page
is found and zeroed (32 ms for a prompt of 1,000 tokens of SmolLM2 in float32, whose copy takes 3 ms), or, where the
pages are there, still entered into the page table of this process (13 ms to write, 3 ms to read). So after a pool is
mapped a thread goes through it, half a second for each GiB; whoever comes first touches for itself, as without.

A pool that would take what the machine needs (`spare_memory`) is left as it is, and takes memory only as it is used.
"""

import ctypes
import threading
from collections.abc import Callable

import numpy as np

from kvtransfer.spare_memory import spare_bytes

# Linux 5.14; the mmap module's own madvise would hold the interpreter lock.
_MADV_POPULATE_READ, _MADV_POPULATE_WRITE = 22, 23

# At once: whoever maps or unmaps other memory waits for it, for half a millisecond. (A thread of low priority would be
# the wrong politeness: it would be kept from its core while it holds the kernel's lock.)
STEP_BYTES = 1 << 20
_BYTES_PER_LOOK = 16 << 20  # at the memory that is left


class Population:
    """Goes through a mapping, from its creation to its end or to `close`.

    Args:
        buffer: a mapping, from a page's start on.
        missing_bytes: of it, what takes memory when it is touched; the rest is memory already.
        writable: pages will be written, else only read.
        spare: bytes that may be taken now.
    """

    def __init__(
        self, buffer: memoryview, missing_bytes: int, *, writable: bool, spare: Callable[[], int] = spare_bytes
    ) -> None:
        self._buffer = buffer  # mapped as long as the thread runs
        self._missing = missing_bytes
        self._advice = _MADV_POPULATE_WRITE if writable else _MADV_POPULATE_READ
        self._spare = spare
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pool-pages", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Returns when it has ended, by itself."""
        self._thread.join()

    def stop(self) -> None:
        """Has it end after the step that it is at. Idempotent."""
        self._stopped.set()

    def close(self) -> None:
        """Ends it, and lets go of the mapping. Idempotent."""
        self.stop()
        self.wait()
        self._buffer = memoryview(b"")

    def _run(self) -> None:
        madvise = ctypes.CDLL(None).madvise
        madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        address, size = np.frombuffer(self._buffer, np.uint8).ctypes.data, len(self._buffer)
        for start in range(0, size, STEP_BYTES):
            if self._stopped.is_set():
                return
            # Looked at again and again: other pools of this machine grow at the same time.
            if start % _BYTES_PER_LOOK == 0 and self._missing * (size - start) // size > self._spare():
                return
            if madvise(address + start, min(STEP_BYTES, size - start), self._advice) != 0:
                return  # an older kernel, or no memory: pages come as they are touched
