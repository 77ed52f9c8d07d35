"""The bytes of a block pool: who allocated them does not matter to an engine."""

import mmap
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable


@dataclass(frozen=True, slots=True)
class KVLayout:
    """What a block is made of: workers of equal layouts (and weights) can exchange blocks.

    `pool[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]`: a block is one contiguous run of bytes.
    """

    block_size: int  # tokens
    bytes_per_block: int
    fingerprint: bytes  # 16 bytes over weights' identity, dtype and layout; also the root of all block hashes


class PoolMemory(Protocol):
    """One run of memory, zeroed, at least 64-byte aligned, alive until `close`: a `HostMemory` or a `DeviceMemory`."""

    @property
    def nbytes(self) -> int: ...

    def close(self) -> None:
        """Gives the memory back; idempotent."""
        ...


@runtime_checkable
class HostMemory(PoolMemory, Protocol):
    """Memory that the CPU reads and writes."""

    @property
    def buffer(self) -> memoryview:
        """The whole run, writable, one byte an item."""
        ...


@runtime_checkable
class DeviceMemory(PoolMemory, Protocol):
    """Memory of one GPU."""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """The whole run as bytes, so that torch sees it without a copy."""
        ...

    def record_fence(self, stream: int) -> int:
        """Marks what `stream` (a cudaStream_t) has been given so far, and returns the mark.

        Who reads the memory on another stream, or in another process, waits for the mark first. Waiting for a later
        one is waiting for all before; marks are few and used again in turn.
        """
        ...


class PrivateMemory:
    """Memory that no other process can see: for an engine that runs alone."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._map = mmap.mmap(-1, nbytes)
        self.buffer = memoryview(self._map)

    def close(self) -> None:
        """Forgets the memory; it is unmapped when the last tensor over it is gone."""
        self.buffer = memoryview(b"")
