"""One behaviour of every kind of pool that a peer can map: in a memfd, over loopback, and on a GPU (a played one).

A GPU's pool comes twice: mapped by another process, and within its own.
"""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import pytest

from fake_cuda import FakeMachine, importing
from handoffs import LAYOUT
from kvtransfer.cuda_ipc import CudaIpcMapping, CudaIpcMemory
from kvtransfer.errors import PoolUnreachable
from kvtransfer.exported import ExportedMemory
from kvtransfer.handle import PoolHandle
from kvtransfer.loopback import LoopbackMemory
from kvtransfer.mapping import MAPPINGS, HostMapping, PoolMapping, open_mapping
from kvtransfer.memfd import MemfdMemory

SIZE = 10 * LAYOUT.bytes_per_block


class HostPool:
    """A pool in host memory, and a peer that maps it."""

    def __init__(self, memory: MemfdMemory | LoopbackMemory) -> None:
        self.memory: ExportedMemory = memory
        self.buffer = memory.buffer
        self.address = np.frombuffer(memory.buffer, np.uint8).ctypes.data

    def as_peer(self) -> AbstractContextManager[None]:
        return nullcontext()

    def write(self, at: int, data: bytes) -> None:
        self.buffer[at : at + len(data)] = data

    def read(self, at: int, nbytes: int) -> bytes:
        return bytes(self.buffer[at : at + nbytes])

    def read_mapping(self, mapping: PoolMapping, at: int, nbytes: int) -> bytes:
        assert isinstance(mapping, HostMapping)
        assert len(mapping.buffer) == SIZE
        return bytes(mapping.buffer[at : at + nbytes])

    def lose_owner(self) -> None:
        self.memory.close()

    def check(self) -> None:
        """Files and mappings are counted in test_memfd."""


class CudaPool:
    """A pool on a GPU, and a peer that maps it: of another process, or of the same."""

    def __init__(self, *, same_process: bool = False) -> None:
        self.machine = FakeMachine()
        self.owner = self.machine.process()
        self.peer = self.owner if same_process else self.machine.process()
        self.cuda_memory = CudaIpcMemory(SIZE, 0, self.owner)
        self.memory: ExportedMemory = self.cuda_memory
        self.address = self.cuda_memory.pointer

    def as_peer(self) -> AbstractContextManager[None]:
        return importing(self.peer)

    def write(self, at: int, data: bytes) -> None:
        self.owner.view(self.address + at, len(data))[:] = data

    def read(self, at: int, nbytes: int) -> bytes:
        return bytes(self.owner.view(self.address + at, nbytes))

    def read_mapping(self, mapping: PoolMapping, at: int, nbytes: int) -> bytes:
        assert isinstance(mapping, CudaIpcMapping)
        return bytes(self.peer.view(mapping.pointer + at, nbytes))

    def lose_owner(self) -> None:
        if self.peer is self.owner:
            self.memory.close()
        else:
            self.owner.kill()

    def check(self) -> None:
        self.machine.assert_nothing_left()


Pool = HostPool | CudaPool

# Of each kind of handle, at least one.
POOLS: dict[str, Callable[[], Pool]] = {
    "memfd": lambda: HostPool(MemfdMemory(SIZE)),
    "loopback": lambda: HostPool(LoopbackMemory(SIZE)),
    "cuda_ipc": CudaPool,
    "cuda_ipc of the same process": lambda: CudaPool(same_process=True),
}


@pytest.fixture(params=POOLS)
def pool(request: pytest.FixtureRequest) -> Iterator[Pool]:
    pool = POOLS[request.param]()
    with pool.as_peer():
        yield pool
    pool.memory.close()
    pool.check()


@pytest.fixture(params=["memfd", "loopback"])
def host_pool(request: pytest.FixtureRequest) -> Iterator[Pool]:
    pool = POOLS[request.param]()
    yield pool
    pool.memory.close()


def test_every_kind_of_pool_that_can_be_mapped_is_tested_here() -> None:
    assert {name.partition(" ")[0] for name in POOLS} == set(MAPPINGS)


def test_memory_is_zeroed_writable_aligned_and_of_the_size_asked_for(pool: Pool) -> None:
    assert pool.memory.nbytes == SIZE
    assert pool.read(0, SIZE) == bytes(SIZE)
    pool.write(SIZE - 1, b"x")
    assert pool.read(SIZE - 2, 2) == b"\0x"
    assert pool.address % 256 == 0


def test_a_handle_names_the_pool_its_instance_and_its_blocks(pool: Pool) -> None:
    handle = pool.memory.handle("instance-1", LAYOUT)
    assert handle.instance_id == "instance-1"
    assert handle.kind in MAPPINGS
    assert handle.size == SIZE
    assert handle.bytes_per_block == LAYOUT.bytes_per_block
    assert handle.fingerprint == LAYOUT.fingerprint
    assert handle.num_blocks == 10


def test_a_mapping_shows_what_the_owner_writes_before_and_after(pool: Pool) -> None:
    pool.write(0, b"a")
    mapping = open_mapping(pool.memory.handle("instance-1", LAYOUT))
    pool.write(SIZE - 1, b"b")
    assert pool.read_mapping(mapping, 0, SIZE) == b"a" + bytes(SIZE - 2) + b"b"
    mapping.close()


def test_two_mappings_of_one_pool_live_beside_each_other(pool: Pool) -> None:
    """One that was let go under a copy, and one made for the next hand-off."""
    pool.write(5, b"a")
    handle = pool.memory.handle("instance-1", LAYOUT)
    first, second = open_mapping(handle), open_mapping(handle)
    first.close()
    assert pool.read_mapping(second, 5, 1) == b"a"
    second.close()


def test_a_mapping_outlives_its_owner(pool: Pool) -> None:
    pool.write(5, b"a")
    mapping = open_mapping(pool.memory.handle("instance-1", LAYOUT))
    pool.lose_owner()
    assert pool.read_mapping(mapping, 5, 1) == b"a"
    mapping.close()


def test_memory_that_is_closed_cannot_be_mapped_any_more(pool: Pool) -> None:
    handle = pool.memory.handle("instance-1", LAYOUT)
    pool.memory.close()
    with pytest.raises(PoolUnreachable, match="instance-1"):
        open_mapping(handle)


def test_a_handle_of_another_size_or_offset_is_refused(pool: Pool) -> None:
    handle = pool.memory.handle("instance-1", LAYOUT)
    mapping = open_mapping(handle)
    for change in ({"size": SIZE + 64}, {"size": SIZE - 64}, {"offset": handle.offset + 64}):
        with pytest.raises(PoolUnreachable, match="instance-1"):
            open_mapping(dataclasses.replace(handle, **change))  # type: ignore[arg-type]
    mapping.close()


def test_closing_twice_does_nothing_more(pool: Pool) -> None:
    mapping = open_mapping(pool.memory.handle("instance-1", LAYOUT))
    mapping.close()
    mapping.close()
    pool.memory.close()
    pool.memory.close()


def test_a_peer_cannot_write(host_pool: HostPool) -> None:
    mapping = open_mapping(host_pool.memory.handle("instance-1", LAYOUT))
    assert isinstance(mapping, HostMapping)
    with pytest.raises(TypeError):
        mapping.buffer[0] = 1
    mapping.close()


def test_an_array_over_memory_stays_usable_after_it_is_closed(host_pool: HostPool) -> None:
    array = np.frombuffer(host_pool.buffer, np.uint8)
    host_pool.memory.close()
    array[0] = 1
    assert array[0] == 1


def test_a_kind_that_is_unknown_here_is_named() -> None:
    handle = PoolHandle("instance-1", "carrier pigeon", b"", 0, SIZE, 64, b"")
    with pytest.raises(PoolUnreachable, match="'carrier pigeon' cannot be mapped here, only cuda_ipc, loopback, memfd"):
        open_mapping(handle)
