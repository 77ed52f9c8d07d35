"""The proof that a block pool is whole (I1) and prefix-closed (I2): it walks everything, for tests and idle moments."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from engine.kvcache.block import NULL_BLOCK_ID, KVCacheBlock

if TYPE_CHECKING:
    from engine.kvcache.block_pool import BlockPool


def check_pool(pool: BlockPool) -> None:
    """Proves counts, free queue, hash map, parents and the order of eviction.

    Raises:
        AssertionError: something does not agree; the message has the numbers.
    """
    pool.free_queue.check_integrity()
    place = {block.block_id: index for index, block in enumerate(pool.free_queue)}
    null_block = pool.blocks[NULL_BLOCK_ID]
    assert not null_block.is_active, f"the null block is held: {null_block}"
    assert null_block.block_hash is None, f"the null block is registered: {null_block}"
    assert NULL_BLOCK_ID not in place, "the null block is in the free queue"

    for block in pool.blocks[NULL_BLOCK_ID + 1 :]:
        assert block.ref_cnt >= 0, f"negative count: {block}"
        assert block.is_active != (block.block_id in place), f"neither or both of held and in the free queue: {block}"
        _check_content(pool, block)
        _check_parent(block, place)
    _check_active_children(pool)
    _check_counts(pool, place)


def _check_content(pool: BlockPool, block: KVCacheBlock) -> None:
    if block.block_hash is not None:
        copies = pool.registered[block.group_id].copies(block.block_hash)
        assert sum(copy is block for copy in copies) == 1, f"not once in the hash map: {block}"


def _check_parent(block: KVCacheBlock, place: dict[int, int]) -> None:
    """A registered block's parent still has the content it had, is held if the child is, and is evicted after it."""
    parent = block.parent
    if parent is None:
        assert block.parent_hash is None, f"parent lost: {block}"
        return
    assert block.block_hash is not None, f"not registered, but has a parent: {block}"
    assert parent.block_hash is not None, f"parent {parent} of {block} is not registered any more"
    assert parent.block_hash == block.parent_hash, f"parent {parent} of {block} has other content by now"
    assert parent.group_id == block.group_id, f"parent {parent} of {block} is of another group"
    if not parent.is_active:
        assert not block.is_active, f"parent {parent} of held {block} may be evicted"
        assert place[block.block_id] < place[parent.block_id], f"parent {parent} would be evicted before {block}"


def _check_active_children(pool: BlockPool) -> None:
    counted = Counter(b.parent.block_id for b in pool.blocks if b.is_active and b.parent is not None)
    for block in pool.blocks:
        assert block.num_active_children == counted[block.block_id], (
            f"{counted[block.block_id]} active children counted: {block}"
        )


def _check_counts(pool: BlockPool, place: dict[int, int]) -> None:
    num_mapped = sum(len(registered.copies(h)) for registered in pool.registered for h in registered)
    num_named = sum(block.block_hash is not None for block in pool.blocks)
    assert num_mapped == num_named, f"{num_mapped} blocks in the hash map, {num_named} with a hash"
    num_active = sum(block.is_active for block in pool.blocks)
    num_cached = sum(block.block_hash is not None and not block.is_active for block in pool.blocks)
    recounted = (len(place) - num_cached, num_cached, num_active)
    counts = (pool.num_free_blocks, pool.num_cached_blocks, pool.num_active_blocks)
    assert counts == recounted, f"free, cached, active are counted as {counts}, but are {recounted}"
    assert sum(counts) == pool.num_blocks - 1, f"free, cached, active {counts} are not {pool.num_blocks - 1} in sum"
