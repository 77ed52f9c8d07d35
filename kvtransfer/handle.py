"""Where a worker's pool is, for another process to map it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PoolHandle:
    """Names one pool of one start of a worker; opened once by each peer, and closed when that instance dies.

    `kind` says how it is mapped ("memfd", "loopback"); `raw` is that kind's own encoding. The mapping holds the blocks
    from `offset` on: block i is the bytes [offset + i · bytes_per_block, offset + (i + 1) · bytes_per_block).
    """

    instance_id: str  # new with every start of the worker
    kind: str
    raw: bytes
    offset: int
    size: int  # bytes of the pool, without what is before `offset`
    bytes_per_block: int
    fingerprint: bytes

    @property
    def num_blocks(self) -> int:
        return self.size // self.bytes_per_block
