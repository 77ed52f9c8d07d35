"""One mapping a peer instance, closed when that instance dies, never under a copy."""

import dataclasses

import pytest

from handoffs import LAYOUT
from kvtransfer.errors import PoolUnreachable
from kvtransfer.handle import PoolHandle
from kvtransfer.loopback import LoopbackMapping, LoopbackMemory
from kvtransfer.mapping import PeerPools

SIZE = 4 * LAYOUT.bytes_per_block


@pytest.fixture
def memory() -> LoopbackMemory:
    return LoopbackMemory(SIZE)


async def test_a_peer_is_mapped_once_for_all_its_hand_offs(memory: LoopbackMemory) -> None:
    pools = PeerPools()
    handle = memory.handle("first", LAYOUT)
    pool = pools.get("peer", handle)
    assert pools.get("peer", dataclasses.replace(handle)) is pool
    assert isinstance(pool.mapping, LoopbackMapping)
    assert len(pool.mapping.buffer) == SIZE


async def test_another_instance_of_a_peer_takes_the_place_of_the_one_before(memory: LoopbackMemory) -> None:
    pools = PeerPools()
    first = pools.get("peer", memory.handle("first", LAYOUT))
    other = LoopbackMemory(SIZE)
    second = pools.get("peer", other.handle("second", LAYOUT))
    assert second is not first
    assert len(pools) == 1
    assert first.closed.is_set()


async def test_a_pool_in_use_is_closed_with_its_last_user(memory: LoopbackMemory) -> None:
    pools = PeerPools()
    pool = pools.get("peer", memory.handle("first", LAYOUT))
    pool.acquire()
    pool.acquire()
    pools.forget("peer")
    assert not pool.closed.is_set()
    pool.release()
    assert not pool.closed.is_set()
    pool.release()
    assert pool.closed.is_set()


async def test_a_peer_that_is_forgotten_is_mapped_again_when_it_is_needed(memory: LoopbackMemory) -> None:
    pools = PeerPools()
    handle = memory.handle("first", LAYOUT)
    first = pools.get("peer", handle)
    pools.forget("peer")
    pools.forget("peer")
    assert pools.get("peer", handle) is not first


async def test_a_pool_that_cannot_be_mapped_leaves_nothing_behind(memory: LoopbackMemory) -> None:
    pools = PeerPools()
    pools.get("peer", memory.handle("first", LAYOUT))
    gone = PoolHandle("second", "loopback", b"no such name", 0, SIZE, LAYOUT.bytes_per_block, LAYOUT.fingerprint)
    with pytest.raises(PoolUnreachable, match="instance second is gone"):
        pools.get("peer", gone)
    assert len(pools) == 0, "the instance before it is not kept either"


async def test_closing_lets_go_of_all(memory: LoopbackMemory) -> None:
    pools = PeerPools()
    both = [pools.get(peer, memory.handle("first", LAYOUT)) for peer in ("a", "b")]
    pools.close()
    pools.close()
    assert len(pools) == 0
    assert all(pool.closed.is_set() for pool in both)
