"""Copies of blocks into the own pool, off the event loop.

How bytes move is the own pool's matter (`BlockCopies`): by the CPU between pools in host memory (`HostCopies`, here),
by the GPU between others. Blocks are contiguous, so a run of consecutive blocks on both sides is one copy, whatever the
number of layers. numpy copies without the interpreter lock: neither the event loop nor the engine waits for it.
"""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvtransfer.consumer import MAX_BYTES_PER_COPY
from kvtransfer.errors import TransferError
from kvtransfer.events import CopyEnded, TransferStats
from kvtransfer.mapping import HostMapping, PeerPool

Blocks = NDArray[np.uint8]  # [num_blocks, bytes_per_block]


@dataclass(frozen=True, slots=True)
class Run:
    """`length` consecutive blocks, here and there."""

    source: int
    target: int
    length: int


def runs(source_ids: Sequence[int], target_ids: Sequence[int]) -> Iterator[Run]:
    """The fewest copies that bring block source_ids[i] to target_ids[i], in their order."""
    start = 0
    for i in range(1, len(source_ids) + 1):
        if i < len(source_ids) and all(ids[i] == ids[i - 1] + 1 for ids in (source_ids, target_ids)):
            continue
        yield Run(source_ids[start], target_ids[start], i - start)
        start = i


def copy_blocks(source: Blocks, target: Blocks, source_ids: Sequence[int], target_ids: Sequence[int]) -> TransferStats:
    """Copies block source_ids[i] to target_ids[i], and says what it was.

    Raises:
        ValueError: a block lies outside its pool.
    """
    began = time.perf_counter()
    segments = 0
    for run in runs(source_ids, target_ids):
        # numpy would clip a slice, and repeat a single row, without a word.
        for name, start, pool in (("source", run.source, source), ("target", run.target, target)):
            if start < 0 or start + run.length > len(pool):
                raise ValueError(f"{name} blocks [{start}, {start + run.length}) are not in a pool of {len(pool)}")
        target[run.target : run.target + run.length] = source[run.source : run.source + run.length]
        segments += 1
    return TransferStats(time.perf_counter() - began, len(source_ids) * source.shape[1], segments)


class BlockCopies(Protocol):
    """How blocks come into one pool. All calls on one thread."""

    max_bytes_per_copy: int  # a copy in flight delays an abort, and the copies behind it: a few milliseconds' worth

    def copy(
        self, source: PeerPool, source_ids: Sequence[int], target_ids: Sequence[int], fence: int | None
    ) -> TransferStats:
        """Copies block source_ids[i] to target_ids[i]; when it returns, they are there for whoever reads them.

        Args:
            fence: the holder's mark to wait for before reading; None: the source is filled already.

        Raises:
            ValueError: a block lies outside its pool.
            TransferError: the source cannot be read, or the copy failed.
        """
        ...

    def close(self) -> None:
        """Lets go of the pool. Idempotent."""
        ...


class HostCopies:
    """Between pools in host memory."""

    max_bytes_per_copy = MAX_BYTES_PER_COPY

    def __init__(self, target: memoryview, bytes_per_block: int) -> None:
        self._target = _blocks(target, bytes_per_block)

    def copy(
        self, source: PeerPool, source_ids: Sequence[int], target_ids: Sequence[int], fence: int | None
    ) -> TransferStats:
        assert fence is None, f"host memory is written when it is announced, and has no mark {fence}"
        assert isinstance(source.mapping, HostMapping), source.mapping
        blocks = _blocks(source.mapping.buffer, source.handle.bytes_per_block)
        return copy_blocks(blocks, self._target, source_ids, target_ids)

    def close(self) -> None:
        self._target = np.empty((0, 0), np.uint8)


def _blocks(memory: memoryview, bytes_per_block: int) -> Blocks:
    num_blocks = len(memory) // bytes_per_block
    return np.frombuffer(memory, np.uint8, num_blocks * bytes_per_block).reshape(num_blocks, bytes_per_block)


class Copier:
    """Copies into one pool, on a thread of its own, first come first served."""

    def __init__(self, copies: BlockCopies) -> None:
        self._copies = copies
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kv-copier")

    def copy(
        self,
        pool: PeerPool,
        source_ids: Sequence[int],
        target_ids: Sequence[int],
        fence: int | None,
        ended: Callable[[CopyEnded], None],
    ) -> None:
        """Copies out of a peer's pool; `ended` is called on the running event loop, also if it went wrong.

        Once begun, it runs to its end: whoever wants to stop waits for that. The pool stays mapped meanwhile.
        """
        if not source_ids:
            ended(CopyEnded(TransferStats()))
            return
        loop = asyncio.get_running_loop()
        pool.acquire()

        def work() -> CopyEnded:
            try:
                return CopyEnded(self._copies.copy(pool, source_ids, target_ids, fence))
            except TransferError as error:
                return CopyEnded(TransferStats(), error)
            except Exception as error:  # whatever it was: a copy that never ended would hold its blocks for ever
                return CopyEnded(TransferStats(), TransferError(f"{type(error).__name__}: {error}"))

        def finish(future: asyncio.Future[CopyEnded]) -> None:
            pool.release()
            ended(future.result())

        loop.run_in_executor(self._thread, work).add_done_callback(finish)

    def close(self) -> None:
        """Waits for the copy in flight, and lets go of the pool. Idempotent."""
        self._thread.shutdown(wait=True)
        self._copies.close()
