"""Memory of a pool that peers can reach: what a worker builds its engine on, hands out of, and pulls into."""

from typing import Protocol

from engine.memory import KVLayout, PoolMemory
from kvtransfer.copier import BlockCopies
from kvtransfer.handle import PoolHandle


class ExportedMemory(PoolMemory, Protocol):
    """Implementations: `memfd` (host memory, other processes), `cuda_ipc` (a GPU's, other processes), `loopback`."""

    def handle(self, instance_id: str, layout: KVLayout) -> PoolHandle:
        """How peers map it; valid until `close`."""
        ...

    def copies(self, layout: KVLayout) -> BlockCopies:
        """How peers' blocks are copied into it."""
        ...
