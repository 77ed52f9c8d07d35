"""The kernel that gathers blocks out of one pool into another, as Python launches it.

One launch copies any number of blocks, wherever they lie: a `memcpy` for each run of consecutive blocks would cost a
few microseconds each, and a pool that has been in use for a while has few long runs. The source is `block_copy.cu`;
CuPy compiles it for the GPU at hand (NVRTC: neither nvcc nor headers are needed).
"""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

SOURCE = Path(__file__).with_name("block_copy.cu")

# As in the source: what a thread block copies at once.
THREADS = 256
VECTORS_PER_THREAD = 4

# Bytes that a thread moves at once; each has its kernel.
WIDTHS = (16, 8, 4, 2, 1)

_MAX_THREAD_BLOCKS = 2**31 - 1


@dataclass(frozen=True, slots=True)
class LaunchShape:
    """How many blocks of what size are cut up for one launch."""

    width: int  # bytes of a vector
    vectors_per_block: int
    pieces_per_block: int
    num_thread_blocks: int  # of `THREADS` each


def launch_shape(source: int, target: int, bytes_per_block: int, num_blocks: int) -> LaunchShape:
    """The widest vectors that block and addresses allow, and thread blocks for all of their pieces.

    Args:
        source, target: addresses of both pools' block 0.
    """
    assert bytes_per_block > 0, bytes_per_block
    assert num_blocks > 0, num_blocks
    width = next(w for w in WIDTHS if not (bytes_per_block % w or source % w or target % w))
    vectors = bytes_per_block // width
    pieces = -(-vectors // (THREADS * VECTORS_PER_THREAD))
    # What the kernel counts in 32 bits.
    assert vectors < 2**31, f"a block of {bytes_per_block} bytes"
    assert num_blocks * pieces <= _MAX_THREAD_BLOCKS, f"{num_blocks} blocks of {bytes_per_block} bytes"
    return LaunchShape(width, vectors, pieces, num_blocks * pieces)


class BlockKernel(Protocol):
    """Copies blocks within the memory that one GPU can reach."""

    def __call__(
        self,
        stream: int,
        source: int,
        target: int,
        source_ids: int,
        target_ids: int,
        num_blocks: int,
        bytes_per_block: int,
    ) -> None:
        """Gives `stream` the copies of block source_ids[i] to target_ids[i]; does not wait for them.

        Args:
            source, target: addresses of both pools' block 0, in memory of this GPU, or of one that it can reach.
            source_ids, target_ids: addresses of int32[num_blocks] in this GPU's memory.

        Raises:
            RuntimeError: it cannot be launched (CuPy's driver errors are such).
        """
        ...


class CudaBlockKernel:
    """The real one, for one GPU; all calls on threads whose current device that is. Implements `BlockKernel`."""

    def __init__(self, device: int) -> None:
        """Compiles it, which takes part of a second where CuPy has not done so before.

        Raises:
            ImportError: CuPy is not installed.
            RuntimeError: it cannot be loaded.
        """
        import cupy

        with cupy.cuda.Device(device):
            module = cupy.RawModule(code=SOURCE.read_text())
            self._kernels = {width: module.get_function(f"copy_blocks_{width}") for width in WIDTHS}

    def __call__(
        self,
        stream: int,
        source: int,
        target: int,
        source_ids: int,
        target_ids: int,
        num_blocks: int,
        bytes_per_block: int,
    ) -> None:
        shape = launch_shape(source, target, bytes_per_block, num_blocks)
        # Their C types: CuPy passes a Python int as 64 bits, whatever the parameter is.
        arguments = (
            *(np.uint64(address) for address in (source, target, source_ids, target_ids)),
            np.uint32(shape.vectors_per_block),
            np.uint32(shape.pieces_per_block),
        )
        with _current_stream(stream):
            self._kernels[shape.width]((shape.num_thread_blocks,), (THREADS,), arguments)


class _ForeignStream:
    """A stream's address in the form that CuPy takes from others."""

    def __init__(self, stream: int) -> None:
        self._stream = stream

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, self._stream)  # version of the protocol, address


def _current_stream(stream: int) -> AbstractContextManager[Any]:
    """Within it CuPy launches on `stream`, on this thread."""
    from cupy.cuda import Stream

    if hasattr(Stream, "from_external"):
        context: AbstractContextManager[Any] = Stream.from_external(_ForeignStream(stream))
    else:  # CuPy 13
        from cupy.cuda import ExternalStream

        context = ExternalStream(stream)
    return context
