"""Copies: few, right, never outside a pool."""

import asyncio
import itertools
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from handoffs import FINGERPRINT
from kvtransfer.copier import Copier, HostCopies, Run, copy_blocks, runs
from kvtransfer.events import CopyEnded
from kvtransfer.handle import PoolHandle
from kvtransfer.mapping import PeerPool

BYTES = 8


def numbered(num_blocks: int) -> np.ndarray:
    """Block i holds i in each byte."""
    return np.repeat(np.arange(num_blocks, dtype=np.uint8)[:, None], BYTES, axis=1)


@pytest.mark.parametrize(
    ("sources", "targets", "expected"),
    [
        ([], [], []),
        ([5], [9], [Run(5, 9, 1)]),
        ([5, 6, 7], [9, 10, 11], [Run(5, 9, 3)]),
        ([5, 6, 7], [9, 11, 12], [Run(5, 9, 1), Run(6, 11, 2)]),
        ([5, 7, 8], [9, 10, 11], [Run(5, 9, 1), Run(7, 10, 2)]),
        ([7, 6, 5], [11, 10, 9], [Run(7, 11, 1), Run(6, 10, 1), Run(5, 9, 1)]),
        ([5, 5], [9, 10], [Run(5, 9, 1), Run(5, 10, 1)]),
    ],
)
def test_consecutive_blocks_on_both_sides_are_one_copy(
    sources: list[int], targets: list[int], expected: list[Run]
) -> None:
    assert list(runs(sources, targets)) == expected


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=40))
def test_runs_cover_every_pair_once_in_order_and_cannot_be_joined(pairs: list[tuple[int, int]]) -> None:
    found = list(runs([s for s, _ in pairs], [t for _, t in pairs]))
    assert [(r.source + i, r.target + i) for r in found for i in range(r.length)] == pairs
    for a, b in itertools.pairwise(found):
        assert (a.source + a.length, a.target + a.length) != (b.source, b.target)


@given(st.permutations(range(12)), st.permutations(range(12)), st.integers(0, 12))
def test_each_block_lands_where_it_should_and_no_other_is_touched(
    sources: list[int], targets: list[int], count: int
) -> None:
    source, target = numbered(12), np.full((12, BYTES), 255, np.uint8)
    stats = copy_blocks(source, target, sources[:count], targets[:count])
    expected = np.full((12, BYTES), 255, np.uint8)
    for s, t in zip(sources[:count], targets[:count], strict=True):
        expected[t] = s
    assert (target == expected).all()
    assert stats.bytes == count * BYTES
    assert stats.segments == len(list(runs(sources[:count], targets[:count])))


@pytest.mark.parametrize(
    ("sources", "targets"), [([4], [0]), ([0], [4]), ([3, 4], [0, 1]), ([-1], [0]), ([0, 1], [3, 4])]
)
def test_a_block_outside_a_pool_is_refused(sources: list[int], targets: list[int]) -> None:
    source, target = numbered(4), numbered(4)
    with pytest.raises(ValueError, match=r"blocks \[.*\) are not in a pool of 4"):
        copy_blocks(source, target, sources, targets)


class ArrayMapping:
    """A mapping over an array."""

    owner_fd = None

    def __init__(self, blocks: np.ndarray) -> None:
        self.buffer = memoryview(blocks.reshape(-1))
        self.is_closed = False

    def close(self) -> None:
        self.is_closed = True


def a_pool(num_blocks: int) -> tuple[PeerPool, ArrayMapping]:
    mapping = ArrayMapping(numbered(num_blocks))
    handle = PoolHandle("peer", "array", b"", 0, num_blocks * BYTES, BYTES, FINGERPRINT)
    return PeerPool(handle, mapping), mapping


async def test_a_copy_runs_beside_the_event_loop_and_its_end_is_told_on_it() -> None:
    pool, _ = a_pool(4)
    target = bytearray(4 * BYTES)
    copier = Copier(HostCopies(memoryview(target), BYTES))
    ended: asyncio.Future[CopyEnded] = asyncio.get_running_loop().create_future()
    told_on: list[threading.Thread] = []

    def tell(event: CopyEnded) -> None:
        told_on.append(threading.current_thread())
        ended.set_result(event)

    copier.copy(pool, [1, 2], [2, 3], None, tell)
    event = await ended
    assert event.error is None
    assert (event.stats.bytes, event.stats.segments) == (2 * BYTES, 1)
    assert bytes(target) == bytes(2 * BYTES) + bytes([1] * BYTES + [2] * BYTES)
    assert told_on == [threading.current_thread()]
    copier.close()
    copier.close()


async def test_a_pool_stays_mapped_until_the_copy_out_of_it_has_ended() -> None:
    pool, mapping = a_pool(4)
    copier = Copier(HostCopies(memoryview(bytearray(4 * BYTES)), BYTES))
    ended: asyncio.Future[CopyEnded] = asyncio.get_running_loop().create_future()
    copier.copy(pool, [1], [1], None, ended.set_result)
    pool.retire()
    assert not mapping.is_closed
    await ended
    assert mapping.is_closed
    copier.close()


async def test_a_copy_of_no_blocks_ends_at_once() -> None:
    pool, _ = a_pool(4)
    copier = Copier(HostCopies(memoryview(bytearray(4 * BYTES)), BYTES))
    ended: list[CopyEnded] = []
    copier.copy(pool, [], [], None, ended.append)
    assert [event.stats.bytes for event in ended] == [0]
    copier.close()


async def test_a_copy_that_cannot_be_done_is_reported_as_its_end() -> None:
    pool, _ = a_pool(4)
    copier = Copier(HostCopies(memoryview(bytearray(2 * BYTES)), BYTES))
    ended: asyncio.Future[CopyEnded] = asyncio.get_running_loop().create_future()
    copier.copy(pool, [1], [2], None, ended.set_result)
    error = (await ended).error
    assert error is not None
    assert "target blocks [2, 3) are not in a pool of 2" in error.message
    copier.close()
