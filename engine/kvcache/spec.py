"""What a KV cache group keeps of a sequence.

Layers of one kind of attention form a group; each group has its own block table per request, and all share one pool and
one space of block ids. The specification of a group says how many blocks a sequence needs in it.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

from engine.kvcache.slots import num_blocks_for


@dataclass(frozen=True, slots=True)
class KVCacheSpec(ABC):
    """One KV cache group.

    Raises:
        ValueError: a block size below 1.
    """

    block_size: int  # tokens a block; equal in all groups of a pool

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise ValueError(f"block_size must be at least 1, not {self.block_size}")

    @abstractmethod
    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that a sequence of `num_tokens` tokens holds in this group."""


@dataclass(frozen=True, slots=True)
class FullAttentionSpec(KVCacheSpec):
    """Every token sees all before it: all blocks are kept, and a cached block is of use only after its parent."""

    def num_blocks_for(self, num_tokens: int) -> int:
        return num_blocks_for(num_tokens, self.block_size)
