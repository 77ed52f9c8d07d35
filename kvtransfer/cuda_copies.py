"""Copies of blocks into a pool on a GPU, by that GPU, beside the engine's work.

    a peer's pool on a GPU    one kernel gathers all blocks, over NVLink or PCIe if the GPU is another
    a pool in host memory     a memcpy for each run of consecutive blocks (slots of a peer's staging area; a CPU's pool)

Order, on a stream of its own: first come the engine's steps that nobody has waited for, since they may still use what
the blocks held before; then the holder's fence, since the blocks may still be computed; then the copy, and the thread
waits for it. So when `copy` returns the blocks are there for every stream, and nothing is in flight into them.
"""

import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from functools import partial

import numpy as np

from engine.cuda.runtime import CudaError
from engine.memory import PrivateMemory
from kvtransfer.block_copy import BlockKernel, CudaBlockKernel
from kvtransfer.copier import Run, runs
from kvtransfer.cuda_ipc import CudaIpcMapping, CudaIpcMemory
from kvtransfer.cuda_stream import PinnedMemory, SideStream
from kvtransfer.errors import TransferError
from kvtransfer.events import TransferStats
from kvtransfer.mapping import HostMapping, PeerPool

# One launch copies so many blocks at most: the size of the ids' buffers, 64 KiB.
MAX_BLOCKS_PER_LAUNCH = 8192

# What a copy costs besides its bytes is some 100 us: launch, waiting, threads. 128 MiB are 5 ms over PCIe 4.
MAX_BYTES_PER_COPY = 128 << 20

# Pinning takes time and memory from everybody: a staging area is worth it, the pool of a CPU worker is not.
MAX_PINNED_BYTES = 1 << 30


class CudaCopies:
    """Into one pool on a GPU. Implements `copier.BlockCopies`."""

    max_bytes_per_copy = MAX_BYTES_PER_COPY

    def __init__(self, memory: CudaIpcMemory, bytes_per_block: int, kernel: BlockKernel | None = None) -> None:
        """Makes everything that copies need; the pool's device becomes current.

        Args:
            kernel: None: the real one, compiled here.

        Raises:
            CudaError: the device has no stream or no memory for it.
            ImportError: CuPy is not installed.
        """
        self._memory = memory
        self._runtime = runtime = memory.runtime
        self._bytes_per_block = bytes_per_block
        self._num_blocks = memory.nbytes // bytes_per_block
        self._kernel = kernel or CudaBlockKernel(memory.device)
        self._pinned: dict[PeerPool, PinnedMemory] = {}
        # Ids of both pools, here and on the GPU. One pair of buffers: no copy begins before the last one has ended.
        nbytes = 2 * MAX_BLOCKS_PER_LAUNCH * np.dtype(np.int32).itemsize
        self._host_ids = np.frombuffer(PrivateMemory(nbytes).buffer, np.int32)
        with ExitStack() as undo:
            self._stream = SideStream(runtime, memory.device)
            undo.callback(self._stream.close)
            undo.callback(PinnedMemory(runtime, memory.device, self._host_ids.ctypes.data, nbytes).close)
            self._device_ids = runtime.malloc(nbytes)
            undo.callback(self._free_ids)
            self._undo = undo.pop_all()

    def copy(
        self, source: PeerPool, source_ids: Sequence[int], target_ids: Sequence[int], fence: int | None
    ) -> TransferStats:
        began = time.perf_counter()
        found = list(runs(source_ids, target_ids))
        self._check(source, found)
        mapping = source.mapping
        with self._stream.work() as stream:
            self._memory.wait_own_fence(stream)
            if isinstance(mapping, CudaIpcMapping):
                if fence is not None:
                    mapping.wait_fence(stream, fence)
                self._gather(mapping.pointer, source_ids, target_ids, stream)
            elif isinstance(mapping, HostMapping):
                assert fence is None, f"host memory is written when it is announced, and has no mark {fence}"
                self._upload(source, mapping, found, stream)
            else:
                raise TransferError(f"blocks of a pool of kind {source.handle.kind!r} cannot be copied to a GPU")
        return TransferStats(time.perf_counter() - began, len(source_ids) * self._bytes_per_block, len(found))

    def close(self) -> None:
        """Lets go of the pool, and of host memory of peers. Idempotent."""
        for pool in list(self._pinned):
            self._unpin(pool)
        self._undo.close()

    def _free_ids(self) -> None:
        with suppress(CudaError):  # the device is lost, and its memory with it
            self._runtime.set_device(self._memory.device)
            self._runtime.free(self._device_ids)

    def _check(self, source: PeerPool, found: Sequence[Run]) -> None:
        """An id is an address: none may lie outside its pool."""
        if source.handle.bytes_per_block != self._bytes_per_block:
            raise ValueError(f"blocks of {source.handle.bytes_per_block} bytes into blocks of {self._bytes_per_block}")
        for run in found:
            for name, start, size in (
                ("source", run.source, source.handle.num_blocks),
                ("target", run.target, self._num_blocks),
            ):
                if start < 0 or start + run.length > size:
                    raise ValueError(f"{name} blocks [{start}, {start + run.length}) are not in a pool of {size}")

    def _gather(self, source: int, source_ids: Sequence[int], target_ids: Sequence[int], stream: int) -> None:
        for start in range(0, len(source_ids), MAX_BLOCKS_PER_LAUNCH):
            if start:
                self._runtime.stream_synchronize(stream)  # the ids of the last launch have been read
            ids = (source_ids[start : start + MAX_BLOCKS_PER_LAUNCH], target_ids[start : start + MAX_BLOCKS_PER_LAUNCH])
            count = len(ids[0])
            self._host_ids[:count], self._host_ids[count : 2 * count] = ids
            nbytes = count * self._host_ids.itemsize
            self._runtime.memcpy_async(self._device_ids, self._host_ids.ctypes.data, 2 * nbytes, stream)
            self._kernel(
                stream,
                source,
                self._memory.pointer,
                self._device_ids,
                self._device_ids + nbytes,
                count,
                self._bytes_per_block,
            )

    def _upload(self, pool: PeerPool, mapping: HostMapping, found: Sequence[Run], stream: int) -> None:
        blocks = np.frombuffer(mapping.buffer, np.uint8)
        self._pin(pool, blocks.ctypes.data, blocks.nbytes, read_only=not blocks.flags.writeable)
        size = self._bytes_per_block
        for run in found:
            self._runtime.memcpy_async(
                self._memory.pointer + run.target * size,
                blocks.ctypes.data + run.source * size,
                run.length * size,
                stream,
            )

    def _pin(self, pool: PeerPool, pointer: int, nbytes: int, *, read_only: bool) -> None:
        """Once a peer; undone before it is unmapped."""
        if pool not in self._pinned and nbytes <= MAX_PINNED_BYTES:
            self._pinned[pool] = PinnedMemory(self._runtime, self._memory.device, pointer, nbytes, read_only=read_only)
            pool.before_unmapping(partial(self._unpin, pool))

    def _unpin(self, pool: PeerPool) -> None:
        """On the event loop's thread, when no copy out of the pool is in flight."""
        pinned = self._pinned.pop(pool, None)
        if pinned is not None:
            pinned.close()


class CudaStagingCopies:
    """Out of one pool on a GPU, into slots in host memory. Implements `staging_area.StagingCopies`."""

    def __init__(self, memory: CudaIpcMemory, slots: memoryview, bytes_per_block: int) -> None:
        """
        Raises:
            CudaError: the device has no stream for it.
        """
        self._memory = memory
        self._slots = np.frombuffer(slots, np.uint8)
        self._bytes_per_block = bytes_per_block
        self._stream = SideStream(memory.runtime, memory.device)
        self._pinned: PinnedMemory | None = None

    def copy(self, block_ids: Sequence[int], slot_ids: Sequence[int], fence: int | None) -> None:
        runtime, size, slots = self._memory.runtime, self._bytes_per_block, self._slots.ctypes.data
        if self._pinned is None:  # here and not before: most workers never stage, and this takes all of the memory
            self._pinned = PinnedMemory(runtime, self._memory.device, slots, self._slots.nbytes)
        with self._stream.work() as stream:
            if fence is not None:
                self._memory.wait_fence(stream, fence)
            for run in runs(block_ids, slot_ids):
                runtime.memcpy_async(
                    slots + run.target * size, self._memory.pointer + run.source * size, run.length * size, stream
                )

    def close(self) -> None:
        if self._pinned is not None:
            self._pinned.close()
        self._stream.close()
        self._slots = np.empty(0, np.uint8)
