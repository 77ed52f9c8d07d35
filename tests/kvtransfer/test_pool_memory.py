"""One behaviour of every kind of pool that a peer can map: in a memfd, and over loopback."""

from collections.abc import Iterator
from typing import Protocol

import numpy as np
import pytest

from engine.memory import KVLayout
from handoffs import LAYOUT
from kvtransfer.errors import PoolUnreachable
from kvtransfer.handle import PoolHandle
from kvtransfer.loopback import LoopbackMemory
from kvtransfer.mapping import MAPPINGS, open_mapping
from kvtransfer.memfd import MemfdMemory

SIZE = 10 * LAYOUT.bytes_per_block


class SharedMemory(Protocol):
    @property
    def buffer(self) -> memoryview: ...

    def handle(self, instance_id: str, layout: KVLayout) -> PoolHandle: ...

    def close(self) -> None: ...


MEMORIES: dict[str, type[MemfdMemory] | type[LoopbackMemory]] = {"memfd": MemfdMemory, "loopback": LoopbackMemory}


@pytest.fixture(params=MEMORIES)
def memory(request: pytest.FixtureRequest) -> Iterator[SharedMemory]:
    memory = MEMORIES[request.param](SIZE)
    yield memory
    memory.close()


def test_every_kind_of_pool_that_can_be_mapped_is_tested_here() -> None:
    assert set(MEMORIES) == set(MAPPINGS)


def test_memory_is_zeroed_writable_aligned_and_of_the_size_asked_for(memory: SharedMemory) -> None:
    array = np.frombuffer(memory.buffer, np.uint8)
    assert array.size == SIZE
    assert not array.any()
    assert array.flags.writeable
    assert array.ctypes.data % 64 == 0


def test_a_handle_names_the_pool_its_instance_and_its_blocks(memory: SharedMemory) -> None:
    handle = memory.handle("instance-1", LAYOUT)
    assert handle.instance_id == "instance-1"
    assert handle.kind in MAPPINGS
    assert handle.size == SIZE
    assert handle.bytes_per_block == LAYOUT.bytes_per_block
    assert handle.fingerprint == LAYOUT.fingerprint
    assert handle.num_blocks == 10


def test_a_mapping_shows_what_the_owner_writes_before_and_after(memory: SharedMemory) -> None:
    memory.buffer[0] = 1
    mapping = open_mapping(memory.handle("instance-1", LAYOUT))
    memory.buffer[SIZE - 1] = 2
    assert len(mapping.buffer) == SIZE
    assert (mapping.buffer[0], mapping.buffer[SIZE - 1]) == (1, 2)
    mapping.close()


def test_a_peer_cannot_write(memory: SharedMemory) -> None:
    mapping = open_mapping(memory.handle("instance-1", LAYOUT))
    with pytest.raises(TypeError):
        mapping.buffer[0] = 1
    mapping.close()


def test_a_mapping_outlives_its_owner(memory: SharedMemory) -> None:
    memory.buffer[5] = 7
    mapping = open_mapping(memory.handle("instance-1", LAYOUT))
    memory.close()
    assert mapping.buffer[5] == 7
    mapping.close()


def test_memory_that_is_closed_cannot_be_mapped_any_more(memory: SharedMemory) -> None:
    handle = memory.handle("instance-1", LAYOUT)
    memory.close()
    with pytest.raises(PoolUnreachable, match="instance-1"):
        open_mapping(handle)


def test_closing_twice_does_nothing_more(memory: SharedMemory) -> None:
    mapping = open_mapping(memory.handle("instance-1", LAYOUT))
    mapping.close()
    mapping.close()
    memory.close()
    memory.close()


def test_an_array_over_memory_stays_usable_after_it_is_closed(memory: SharedMemory) -> None:
    array = np.frombuffer(memory.buffer, np.uint8)
    memory.close()
    array[0] = 1
    assert array[0] == 1


def test_a_kind_that_is_unknown_here_is_named() -> None:
    handle = PoolHandle("instance-1", "carrier pigeon", b"", 0, SIZE, 64, b"")
    with pytest.raises(PoolUnreachable, match="'carrier pigeon' cannot be mapped here, only loopback, memfd"):
        open_mapping(handle)
