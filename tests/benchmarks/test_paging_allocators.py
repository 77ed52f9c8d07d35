"""Contiguous allocators against a model that is a plain array of slots."""

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.paging.allocators import (
    BuddyAllocator,
    ContiguousAllocator,
    Extent,
    FirstFitAllocator,
    next_power_of_two,
)

ALLOCATORS: dict[str, Callable[[int], ContiguousAllocator]] = {"first fit": FirstFitAllocator, "buddy": BuddyAllocator}


def free_runs(taken: list[bool], size: int) -> list[int]:
    """Where runs of `size` free slots begin."""
    return [start for start in range(len(taken) - size + 1) if not any(taken[start : start + size])]


def expected(name: str, taken: list[bool], num_slots: int) -> set[Extent]:
    """What the allocator may answer, looking at all slots."""
    if name == "first fit":
        return {Extent(start, num_slots) for start in free_runs(taken, num_slots)[:1]}
    size = next_power_of_two(num_slots)
    return {Extent(start, size) for start in free_runs(taken, size) if start % size == 0}


@pytest.mark.parametrize("name", ALLOCATORS)
@settings(max_examples=200, deadline=None)
@given(capacity=st.integers(1, 70), moves=st.lists(st.tuples(st.booleans(), st.integers(0, 40)), max_size=60))
def test_an_allocator_finds_a_run_exactly_when_there_is_one(
    name: str, capacity: int, moves: list[tuple[bool, int]]
) -> None:
    allocator = ALLOCATORS[name](capacity)
    taken = [False] * capacity
    extents: list[Extent] = []
    for is_free, number in moves:
        if is_free:
            if not extents:
                continue
            extent = extents.pop(number % len(extents))
            allocator.free(extent)
            taken[extent.start : extent.end] = [False] * extent.size
        else:
            possible = expected(name, taken, number + 1)
            given_extent = allocator.allocate(number + 1)
            if given_extent is None:
                assert not possible
                continue
            assert given_extent in possible
            extents.append(given_extent)
            taken[given_extent.start : given_extent.end] = [True] * given_extent.size
        assert allocator.num_free_slots == taken.count(False)
    for extent in extents:
        allocator.free(extent)
    assert allocator.allocate(1 << (capacity.bit_length() - 1)) is not None, "freed runs were not joined"


def test_a_buddy_memory_of_the_papers_size_holds_seven_contexts() -> None:
    allocator = BuddyAllocator(15_728)
    extents = [allocator.allocate(2048) for _ in range(7)]
    assert None not in extents
    assert allocator.allocate(2048) is None
    assert allocator.num_free_slots == 15_728 - 7 * 2048


def test_free_slots_that_lie_apart_serve_nobody() -> None:
    allocator = FirstFitAllocator(30)
    extents = [allocator.allocate(10) for _ in range(3)]
    for extent in (extents[0], extents[2]):
        assert extent is not None
        allocator.free(extent)
    assert allocator.num_free_slots == 20
    assert allocator.allocate(11) is None


@pytest.mark.parametrize(("number", "power"), [(1, 1), (2, 2), (3, 4), (1024, 1024), (1025, 2048)])
def test_the_next_power_of_two_is_not_below(number: int, power: int) -> None:
    assert next_power_of_two(number) == power
