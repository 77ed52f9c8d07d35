"""The block pool by examples; `test_block_pool_states` drives it at random."""

from typing import ClassVar

import pytest

from engine.kvcache.block import KVCacheBlock
from engine.kvcache.block_hash import hash_block, hash_blocks, root_hash
from engine.kvcache.block_pool import BlockPool
from engine.kvcache.events import BlocksRemoved, BlocksStored, CacheCleared
from engine.kvcache.registered import RegisteredBlocks

ROOT = root_hash(b"f" * 16)


def fill(pool, *tokens):
    """Holds a chain of one-token blocks: cached ones first, the rest allocated and registered."""
    hashes = hash_blocks(ROOT, tokens, 1)
    num_cached = sum(pool.is_cached(block_hash) for block_hash in hashes)
    chain = pool.cached_chain(hashes[num_cached - 1]) if num_cached else []
    pool.take(chain)
    rest = pool.allocate(len(tokens) - num_cached)
    assert rest is not None
    table = chain + rest
    for index in range(num_cached, len(tokens)):
        pool.register(table[index], hashes[index], table[index - 1] if index else None)
    return table


def num_hits(pool, *tokens):
    return sum(pool.is_cached(block_hash) for block_hash in hash_blocks(ROOT, tokens, 1))


def counts(pool):
    return pool.num_free_blocks, pool.num_cached_blocks, pool.num_active_blocks


@pytest.fixture
def pool():
    pool = BlockPool(4)  # three usable
    yield pool
    pool.check_integrity()


def test_null_block_is_never_given_out_when_pool_is_emptied(pool):
    assert sorted(pool.allocate(3)) == [1, 2, 3]
    assert pool.allocate(1) is None


def test_pool_is_refused_when_it_has_only_the_null_block():
    with pytest.raises(ValueError, match="not 1"):
        BlockPool(1)


def test_allocate_changes_nothing_when_there_are_not_enough(pool):
    pool.allocate(1)
    before = counts(pool)
    assert pool.allocate(3) is None
    assert counts(pool) == before
    assert pool.take_events() == ()


def test_nothing_is_taken_when_no_blocks_are_asked_for(pool):
    assert pool.allocate(0) == []
    assert counts(pool) == (3, 0, 0)


# --- double free


def test_free_is_refused_whole_when_a_block_held_once_is_named_twice(pool):
    held, other = pool.allocate(2)
    with pytest.raises(ValueError, match=f"block {held} is freed 2 times, but held 1 times"):
        pool.free([other, held, held])
    assert counts(pool) == (1, 0, 2)


def test_free_is_refused_when_it_comes_a_second_time(pool):
    (held,) = pool.allocate(1)
    pool.free([held])
    with pytest.raises(ValueError, match="held 0 times"):
        pool.free([held])
    assert counts(pool) == (3, 0, 0)
    assert len(set(pool.allocate(3))) == 3


def test_free_counts_both_when_a_block_held_twice_is_named_twice(pool):
    (held,) = fill(pool, 1)
    pool.take([held])
    pool.free([held, held])
    assert counts(pool) == (2, 1, 0)


@pytest.mark.parametrize("block_id", [0, -1, 4])
def test_block_ids_are_refused_when_they_are_null_or_outside_the_pool(pool, block_id):
    for operation in (pool.free, pool.take):
        with pytest.raises(ValueError, match=f"not {block_id}"):
            operation([block_id])


def test_holder_cannot_free_a_block_when_only_a_child_keeps_it(pool):
    head, tail = fill(pool, 1, 2)
    pool.free([head])
    with pytest.raises(ValueError, match="held 0 times"):
        pool.free([head])
    assert counts(pool) == (1, 0, 2)
    pool.free([tail])
    assert counts(pool) == (1, 2, 0)


# --- eviction


def test_tail_is_evicted_first_when_pool_is_full(pool):
    pool.free(fill(pool, 1, 2, 3))
    pool.free(fill(pool, 9))
    assert num_hits(pool, 1, 2, 4) == 2
    table = fill(pool, 1, 2, 4)  # takes the block of 9
    assert num_hits(pool, 9) == 0
    assert num_hits(pool, 1, 2, 3) == 2
    pool.free(table)


def test_least_recently_used_prefix_is_evicted_first_when_others_were_hit_again(pool):
    pool.free(fill(pool, 1))
    pool.free(fill(pool, 2))
    pool.free(fill(pool, 3))
    pool.free(fill(pool, 1))
    pool.allocate(1)
    assert [num_hits(pool, token) for token in (1, 2, 3)] == [1, 0, 1]


def test_blocks_without_content_are_reused_first_when_others_are_cached(pool):
    pool.free(fill(pool, 1))
    (empty,) = pool.allocate(1)
    pool.allocate(1)
    pool.free([empty])
    assert pool.allocate(1) == [empty]
    assert num_hits(pool, 1) == 1


def test_blocks_come_out_as_a_run_again_when_they_were_freed_without_content(pool):
    run = pool.allocate(3)
    pool.free(run)
    assert pool.allocate(3) == run == [1, 2, 3]


def test_head_stays_when_pins_are_given_back_head_first(pool):
    head, middle, tail = fill(pool, 1, 2, 3)
    for block_id in (head, middle, tail):
        pool.free([block_id])
        pool.check_integrity()
    pool.allocate(1)
    assert num_hits(pool, 1, 2, 3) == 2


def test_parent_is_not_available_when_only_its_child_is_held(pool):
    head, tail = fill(pool, 1, 2)
    pool.free([head])
    assert pool.num_available_blocks == 1
    assert pool.allocate(2) is None
    pool.free([tail])
    assert pool.num_available_blocks == 3


def test_parent_is_evicted_last_when_two_requests_shared_it(pool):
    one = fill(pool, 1, 2)
    other = fill(pool, 1, 3)
    pool.free(one)
    pool.free(other)
    pool.allocate(2)
    assert (num_hits(pool, 1, 2), num_hits(pool, 1, 3)) == (1, 1)


def test_stale_hash_is_forgotten_when_its_block_is_reused(pool):
    pool.free(fill(pool, 1, 2, 3))
    pool.take_events()
    hashes = hash_blocks(ROOT, [1, 2, 3], 1)
    table = fill(pool, 7, 8, 9)
    assert num_hits(pool, 1, 2, 3) == 0
    assert pool.cached_chain(hashes[0]) == []
    assert pool.take_events() == (
        BlocksRemoved(tuple(reversed(hashes))),
        BlocksStored(tuple(hash_blocks(ROOT, [7, 8, 9], 1))),
    )
    pool.free(table)


# --- duplicates


def two_copies(pool):
    """Two blocks of one content: computed side by side, so neither found the other."""
    (block_hash,) = hash_blocks(ROOT, [5], 1)
    one, other = pool.allocate(2)
    pool.register(one, block_hash)
    pool.register(other, block_hash)
    return block_hash, one, other


def test_hash_is_removed_with_its_last_copy_when_there_are_two(pool):
    block_hash, one, other = two_copies(pool)
    pool.free([one, other])
    assert pool.take_events() == (BlocksStored((block_hash,)),)
    pool.allocate(2)  # the free block, then the first of the copies
    assert pool.is_cached(block_hash)
    assert pool.take_events() == ()
    pool.allocate(1)
    assert not pool.is_cached(block_hash)
    assert pool.take_events() == (BlocksRemoved((block_hash,)),)


def test_held_copy_is_preferred_when_there_are_two(pool):
    block_hash, one, other = two_copies(pool)
    pool.free([one])
    assert pool.cached_chain(block_hash) == [other]


def test_chain_keeps_to_the_parents_of_its_tail_when_there_are_copies_of_the_head():
    pool = BlockPool(6)
    block_hash, one, other = two_copies(pool)
    (tail,) = pool.allocate(1)
    tail_hash = hash_block(block_hash, [6])
    pool.register(tail, tail_hash, other)
    pool.free([one, other, tail])
    assert pool.cached_chain(tail_hash) == [other, tail]
    pool.take([other, tail])
    assert counts(pool) == (2, 1, 2)
    pool.allocate(3)  # the other copy goes: the chain is not touched
    assert pool.cached_chain(tail_hash) == [other, tail]
    pool.check_integrity()


# --- registering


def test_register_is_refused_when_nobody_holds_the_block(pool):
    (block_id,) = pool.allocate(1)
    pool.free([block_id])
    with pytest.raises(ValueError, match="nobody holds"):
        pool.register(block_id, hash_block(ROOT, [1]))


def test_register_is_refused_when_done_before(pool):
    (block_id,) = fill(pool, 1)
    with pytest.raises(ValueError, match="registered already"):
        pool.register(block_id, hash_block(ROOT, [2]))


def test_register_is_refused_when_the_parent_is_not_registered(pool):
    parent, child = pool.allocate(2)
    with pytest.raises(ValueError, match=f"before its parent {parent}"):
        pool.register(child, hash_block(ROOT, [1]), parent)


def test_take_is_refused_when_the_block_is_free(pool):
    with pytest.raises(ValueError, match="free"):
        pool.take([1])


def test_equal_tokens_are_apart_when_groups_differ():
    pool = BlockPool(4, num_groups=2)
    (block_id,) = pool.allocate(1)
    pool.register(block_id, hash_block(ROOT, [1]), group_id=1)
    assert not pool.is_cached(hash_block(ROOT, [1]), 0)
    assert pool.is_cached(hash_block(ROOT, [1]), 1)
    assert pool.take_events() == (BlocksStored((hash_block(ROOT, [1]),), group_id=1),)
    pool.check_integrity()


# --- clearing


def test_only_held_chains_stay_when_pool_is_cleared():
    pool = BlockPool(8)
    pool.free(fill(pool, 7, 8))
    pool.free(fill(pool, 1, 2, 3))
    held = fill(pool, 1, 2)
    pool.take_events()
    pool.clear()
    assert pool.take_events() == (CacheCleared(), BlocksStored(tuple(hash_blocks(ROOT, [1, 2], 1))))
    assert (num_hits(pool, 1, 2, 3), num_hits(pool, 7, 8)) == (2, 0)
    assert counts(pool) == (5, 0, 2)
    pool.free(held)
    pool.check_integrity()


# --- cost


class CountingBlock(KVCacheBlock):
    """A block that counts how often the links of the free queue touch it."""

    __slots__ = ()
    touched: ClassVar[set[int]] = set()

    def __setattr__(self, name, value):
        super().__setattr__(name, value)
        CountingBlock.touched.add(self.block_id)


def test_only_neighbours_are_touched_when_a_block_is_taken_out_of_a_large_pool():
    pool = BlockPool(1000)
    table = fill(pool, *range(900))
    pool.free(table)
    for block in pool.blocks:
        block.__class__ = CountingBlock
    before = next(iter(pool.free_queue))
    for operation in (
        lambda: pool.take([table[0]]),  # in the middle of the queue
        lambda: pool.free([table[0]]),
        lambda: pool.free(pool.allocate(1)),
    ):
        CountingBlock.touched = set()
        operation()
        assert len(CountingBlock.touched - {-1}) <= 3
    assert next(iter(pool.free_queue)) is before


# --- proof


@pytest.mark.parametrize(
    "break_it",
    [
        lambda pool, table: setattr(pool.blocks[0], "ref_cnt", 1),
        lambda pool, table: setattr(pool.blocks[table[1]], "ref_cnt", 0),
        lambda pool, table: setattr(pool.blocks[table[0]], "block_hash", None),
        lambda pool, table: setattr(pool.blocks[table[0]], "block_hash", ROOT),
        lambda pool, table: setattr(pool.blocks[table[1]], "parent", None),
        lambda pool, table: setattr(pool.blocks[table[1]], "num_active_children", 1),
        lambda pool, table: setattr(pool, "registered", [RegisteredBlocks()]),
        lambda pool, table: pool.free_queue.append(pool.blocks[table[1]]),
        lambda pool, table: pool.free_queue.popleft(),
        lambda pool, table: setattr(next(iter(pool.free_queue)), "prev_free", None),
    ],
)
def test_integrity_check_fails_when_anything_is_broken(break_it):
    pool = BlockPool(8)
    table = fill(pool, 1, 2)
    pool.free(fill(pool, 1, 2, 3))
    pool.check_integrity()
    break_it(pool, table)
    with pytest.raises(AssertionError):
        pool.check_integrity()


def test_integrity_check_fails_when_a_head_stands_before_its_tail():
    pool = BlockPool(4)
    head, tail = fill(pool, 1, 2)
    pool.free([head, tail])
    pool.free_queue.remove(pool.blocks[tail])
    pool.free_queue.append(pool.blocks[tail])
    with pytest.raises(AssertionError, match="would be evicted before"):
        pool.check_integrity()
