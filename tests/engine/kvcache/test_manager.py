"""Block tables and pins over the pool, with one group and with two."""

import pytest

from engine.kvcache.block_hash import hash_blocks, root_hash
from engine.kvcache.manager import KVCacheManager
from engine.kvcache.spec import FullAttentionSpec

ROOT = root_hash(b"f" * 16)
BLOCK_SIZE = 4


@pytest.fixture(params=[1, 2], ids=["one group", "two groups"])
def manager(request):
    """Room for eight blocks in each group."""
    manager = KVCacheManager(1 + 8 * request.param, [FullAttentionSpec(BLOCK_SIZE)] * request.param)
    yield manager
    manager.check_integrity()


def compute(manager, request_id, tokens):
    """A request's whole life but its end; how many blocks it found cached."""
    hashes = hash_blocks(ROOT, tokens, BLOCK_SIZE)
    computed = manager.get_computed_blocks(hashes, (len(tokens) - 1) // BLOCK_SIZE)
    assert manager.allocate_slots(request_id, len(tokens), computed=computed)
    manager.cache_blocks(request_id, hashes, len(hashes))
    return computed.num_blocks


def counts(manager):
    """Free, cached, active; for one group."""
    pool, num_groups = manager.pool, len(manager.specs)
    return tuple(n // num_groups for n in (pool.num_free_blocks, pool.num_cached_blocks, pool.num_active_blocks))


def test_groups_are_refused_when_none_or_of_unequal_blocks():
    for specs in ([], [FullAttentionSpec(4), FullAttentionSpec(8)]):
        with pytest.raises(ValueError, match="equal block size"):
            KVCacheManager(8, specs)


def test_spec_is_refused_when_blocks_have_no_tokens():
    with pytest.raises(ValueError, match="not 0"):
        FullAttentionSpec(0)


def test_tables_of_groups_are_disjoint_when_allocated(manager):
    assert manager.allocate_slots("a", 9)
    tables = manager.block_tables("a")
    assert [len(table) for table in tables] == [3] * len(manager.specs)
    assert len({block_id for table in tables for block_id in table}) == manager.num_held_blocks("a")
    assert manager.num_held_blocks("a") == manager.num_blocks_for(9)


def test_tables_grow_in_place_when_more_slots_are_needed(manager):
    assert manager.allocate_slots("a", 4)
    tables = manager.block_tables("a")
    before = [list(table) for table in tables]
    assert manager.allocate_slots("a", 5)
    assert manager.block_tables("a") is tables
    assert [table[:1] for table in tables] == before
    assert [len(table) for table in tables] == [2] * len(tables)


def test_nothing_is_allocated_when_the_last_block_has_room(manager):
    manager.allocate_slots("a", 5)
    before = counts(manager)
    assert manager.allocate_slots("a", 8)
    assert manager.allocate_slots("a", 3)
    assert counts(manager) == before


def test_allocation_changes_nothing_when_one_group_would_go_without():
    manager = KVCacheManager(4, [FullAttentionSpec(BLOCK_SIZE)] * 2)  # three blocks: one group could have two
    assert not manager.allocate_slots("a", 8)
    assert not manager.holds("a")
    assert manager.pool.num_free_blocks == 3


def test_allocation_is_refused_when_it_would_not_leave_what_others_need(manager):
    keep = 2 * len(manager.specs)
    assert not manager.allocate_slots("a", 7 * BLOCK_SIZE, keep_available=keep)
    assert manager.allocate_slots("a", 6 * BLOCK_SIZE, keep_available=keep)


def test_cached_blocks_that_nobody_holds_count_as_new_when_room_is_scarce(manager):
    compute(manager, "a", range(17))
    manager.free("a")
    assert counts(manager) == (4, 4, 0)
    hashes = hash_blocks(ROOT, range(32), BLOCK_SIZE)
    computed = manager.get_computed_blocks(hashes)
    assert computed.num_blocks == 4
    assert not manager.allocate_slots("b", 33, computed=computed)  # nine blocks of eight, though four are cached
    assert counts(manager) == (4, 4, 0)
    assert manager.allocate_slots("b", 32, computed=computed)
    assert counts(manager) == (0, 0, 8)


def test_longest_prefix_is_shared_when_tokens_agree(manager):
    assert compute(manager, "a", range(12)) == 0
    assert compute(manager, "b", [*range(8), 99, 100, 101, 102, 103]) == 2
    for a, b in zip(manager.block_tables("a"), manager.block_tables("b"), strict=True):
        assert a[:2] == b[:2]
        assert not set(a[2:]) & set(b[2:])


def test_last_token_is_left_to_compute_when_the_whole_prompt_is_cached(manager):
    compute(manager, "a", range(8))
    assert compute(manager, "b", range(8)) == 1


def test_prefix_ends_where_one_group_lacks_a_block():
    manager = KVCacheManager(20, [FullAttentionSpec(BLOCK_SIZE)] * 2)
    compute(manager, "a", range(12))
    hashes = hash_blocks(ROOT, range(12), BLOCK_SIZE)
    registered = manager.pool.registered[1]
    registered.remove(hashes[2], registered.copies(hashes[2])[0])
    assert manager.num_computed_blocks(hashes) == 2


@pytest.mark.parametrize("num_cached", range(6))
def test_prefix_is_found_by_bisection_when_so_many_blocks_are_cached(manager, num_cached):
    compute(manager, "a", range(num_cached * BLOCK_SIZE + 1))
    hashes = hash_blocks(ROOT, range(24), BLOCK_SIZE)
    assert manager.num_computed_blocks(hashes) == num_cached
    assert manager.num_computed_blocks(hashes, 3) == min(3, num_cached)


def test_blocks_stay_cached_when_their_request_ends(manager):
    compute(manager, "a", range(10))
    manager.free("a")
    assert counts(manager) == (6, 2, 0)
    manager.free("a")  # holds nothing: nothing to do
    assert compute(manager, "b", range(10)) == 2


def test_pinned_blocks_stay_when_their_request_ends(manager):
    compute(manager, "a", range(10))
    pinned = [block_id for table in manager.block_tables("a") for block_id in table]
    manager.pin(pinned)
    manager.free("a")
    assert manager.num_pins == len(pinned)
    assert counts(manager) == (5, 0, 3)  # the last is full only in part, and pinned like the others
    for block_id in pinned:
        manager.check_integrity()
        manager.unpin([block_id])
    assert manager.num_pins == 0
    assert counts(manager) == (6, 2, 0)


def test_unpin_is_refused_when_not_pinned_though_a_request_holds_the_block(manager):
    compute(manager, "a", range(10))
    block_id, other = manager.block_tables("a")[0][:2]
    manager.pin([block_id, block_id, other])
    with pytest.raises(ValueError, match="unpinned 3 times, but pinned 2 times"):
        manager.unpin([other, block_id, block_id, block_id])
    assert manager.num_pins == 3
    manager.unpin([other, block_id, block_id])
    with pytest.raises(ValueError, match="pinned 0 times"):
        manager.unpin([block_id])


def test_integrity_check_fails_when_a_reference_belongs_to_nobody(manager):
    compute(manager, "a", range(10))
    block_id = manager.block_tables("a")[0][0]
    manager.pool.take([block_id])
    with pytest.raises(AssertionError, match=f"hold block {block_id}"):
        manager.check_integrity()
    manager.pool.free([block_id])


# --- forks


def fork(manager, length, num_forks):
    """Forks "f0", "f1", … of a prompt of so many tokens, which is gone."""
    compute(manager, "prompt", range(length))
    names = [f"f{index}" for index in range(num_forks)]
    for name in names:
        manager.fork("prompt", name)
    manager.free("prompt")
    manager.check_integrity()
    return names


@pytest.mark.parametrize("length", [8, 9, 11, 12])
def test_forks_hold_the_same_blocks_until_they_write(manager, length):
    before = -(-length // BLOCK_SIZE)
    names = fork(manager, length, 3)
    assert counts(manager)[2] == before
    tables = [[list(table) for table in manager.block_tables(name)] for name in names]
    assert tables[0] == tables[1] == tables[2]
    for name in names:
        assert manager.allocate_slots(name, length + 1)
        manager.check_integrity()
    copies = manager.take_copies()
    num_groups = len(manager.specs)
    if length % BLOCK_SIZE == 0:
        assert copies == ()  # full blocks are never written again: each just takes another
        assert counts(manager)[2] == before + 3
        return
    assert counts(manager)[2] == before + 2
    after = [manager.block_tables(name) for name in names]
    expected = [(tables[0][g][-1], after[i][g][-1]) for i in (0, 1) for g in range(num_groups)]
    assert copies == tuple(expected)
    assert [list(table) for table in after[2]] == tables[2], "the last one writes in place"
    assert manager.take_copies() == ()
    for name in names:
        assert manager.allocate_slots(name, length + 1)
    assert manager.take_copies() == ()


def test_tables_are_the_same_lists_after_a_copy(manager):
    first, _ = fork(manager, 6, 2)
    tables = manager.block_tables(first)
    assert manager.allocate_slots(first, 7)
    assert manager.block_tables(first) is tables
    assert len(manager.take_copies()) == len(manager.specs)


def test_growth_and_copy_are_all_or_nothing_when_the_pool_is_short(manager):
    first, second = fork(manager, 6, 2)
    assert manager.allocate_slots("other", 6 * BLOCK_SIZE)
    before = [list(table) for table in manager.block_tables(first)]
    assert not manager.allocate_slots(first, 7)
    assert [list(table) for table in manager.block_tables(first)] == before
    manager.free("other")
    assert manager.allocate_slots("other", 4 * BLOCK_SIZE)
    assert not manager.allocate_slots(first, 9, keep_available=len(manager.specs))  # a copy and a block more
    assert manager.take_copies() == ()
    assert manager.allocate_slots(first, 9)
    assert len(manager.take_copies()) == len(manager.specs)
    assert counts(manager)[0] == 0
    assert manager.allocate_slots(second, 7)  # in place
    assert manager.take_copies() == ()


def test_no_copy_is_made_for_who_is_left_alone(manager):
    first, second = fork(manager, 6, 2)
    manager.free(first)
    assert manager.allocate_slots(second, 7)
    assert manager.take_copies() == ()
    assert counts(manager)[2] == 2


def test_fork_of_a_fork_is_copied_too(manager):
    (first,) = fork(manager, 6, 1)
    assert manager.allocate_slots(first, 7)
    assert manager.take_copies() == ()
    manager.fork(first, "child")
    assert manager.allocate_slots("child", 8)
    assert len(manager.take_copies()) == len(manager.specs)
    assert manager.allocate_slots(first, 8)
    assert manager.take_copies() == ()


def test_pinned_partial_block_is_not_written_by_a_fork(manager):
    compute(manager, "prompt", range(6))
    manager.fork("prompt", "fork")
    pinned = [table[-1] for table in manager.block_tables("prompt")]
    manager.pin(pinned)
    manager.free("prompt")
    assert manager.allocate_slots("fork", 7)
    assert [source for source, _ in manager.take_copies()] == pinned
    manager.unpin(pinned)


def test_integrity_check_fails_when_somebody_would_write_what_others_hold(manager):
    first, second = fork(manager, 6, 2)
    manager._holdings[second].is_forked = False
    with pytest.raises(AssertionError, match=f"{second} would write into blocks that others hold"):
        manager.check_integrity()
    manager._holdings[second].is_forked = True
    assert manager.allocate_slots(first, 7)
