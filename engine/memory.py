"""The bytes of a block pool: who allocated them does not matter to an engine."""

import mmap
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class KVLayout:
    """What a block is made of: workers of equal layouts (and weights) can exchange blocks.

    `pool[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]`: a block is one contiguous run of bytes.
    """

    block_size: int  # tokens
    bytes_per_block: int
    fingerprint: bytes  # 16 bytes over weights' identity, dtype and layout; also the root of all block hashes


class PoolMemory(Protocol):
    """One run of host memory, zeroed, at least 64-byte aligned, alive until `close`."""

    @property
    def buffer(self) -> memoryview:
        """The whole run, writable, one byte an item."""
        ...

    def close(self) -> None:
        """Gives the memory back; idempotent."""
        ...


class PrivateMemory:
    """Memory that no other process can see: for an engine that runs alone."""

    def __init__(self, nbytes: int) -> None:
        self._map = mmap.mmap(-1, nbytes)
        self.buffer = memoryview(self._map)

    def close(self) -> None:
        """Forgets the memory; it is unmapped when the last tensor over it is gone."""
        self.buffer = memoryview(b"")
