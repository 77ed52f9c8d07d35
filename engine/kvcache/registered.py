"""Registered blocks by the hash of their content."""

from collections.abc import Iterator

from engine.kvcache.block import KVCacheBlock
from engine.kvcache.block_hash import BlockHash


class RegisteredBlocks:
    """Every copy of each content of one KV cache group.

    Nearly all contents have one copy, which is kept as it is: a list for each would be another object that every full
    garbage collection looks at, and with a million of them one takes 0.15 s.
    """

    def __init__(self) -> None:
        self._blocks: dict[BlockHash, KVCacheBlock | list[KVCacheBlock]] = {}

    def __contains__(self, block_hash: BlockHash) -> bool:
        return block_hash in self._blocks

    def __iter__(self) -> Iterator[BlockHash]:
        return iter(self._blocks)

    def copies(self, block_hash: BlockHash) -> list[KVCacheBlock]:
        """In the order in which they were added; empty if there are none."""
        found = self._blocks.get(block_hash)
        if found is None:
            return []
        return found if isinstance(found, list) else [found]

    def add(self, block_hash: BlockHash, block: KVCacheBlock) -> bool:
        """True if it is the first copy."""
        found = self._blocks.setdefault(block_hash, block)
        if found is block:
            return True
        if isinstance(found, list):
            found.append(block)
        else:
            self._blocks[block_hash] = [found, block]
        return False

    def remove(self, block_hash: BlockHash, block: KVCacheBlock) -> bool:
        """True if it was the last copy."""
        found = self._blocks[block_hash]
        if found is block:
            del self._blocks[block_hash]
            return True
        assert isinstance(found, list), f"not registered: {block}"
        found.remove(block)
        if len(found) == 1:
            self._blocks[block_hash] = found[0]
        return False
