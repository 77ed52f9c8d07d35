"""Pools on GPUs between processes, over a played CUDA: what is refused and why, and what waits for what."""

import contextlib
import dataclasses
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.cuda.runtime import CudaError
from engine.memory import DeviceMemory, HostMemory
from fake_cuda import Event, FakeMachine, FakeProcess, StuckError, importing
from handoffs import LAYOUT
from kvtransfer import cuda_peer
from kvtransfer.cuda_fences import NUM_FENCES
from kvtransfer.cuda_handle import HEADER, MAGIC, OFFSET, CudaHandle
from kvtransfer.cuda_ipc import CudaIpcMapping, CudaIpcMemory
from kvtransfer.errors import PoolUnreachable, TransferError
from kvtransfer.handle import PoolHandle
from kvtransfer.mapping import PeerPools

SIZE = 10 * LAYOUT.bytes_per_block


class Pair:
    """An owner with a pool, and a peer, which are processes of one machine."""

    def __init__(self, machine: FakeMachine, owner: FakeProcess, peer: FakeProcess) -> None:
        self.machine = machine
        self.owner = owner
        self.peer = peer
        self.memory = CudaIpcMemory(SIZE, 0, owner)
        self.handle = self.memory.handle("owner", LAYOUT)

    def map(self, handle: PoolHandle | None = None) -> CudaIpcMapping:
        return CudaIpcMapping(handle or self.handle, self.peer, 0)

    def changed(self, **changes: object) -> PoolHandle:
        """Its handle, with other things in CUDA's part of it."""
        cuda = dataclasses.replace(CudaHandle.unpack(self.handle.raw), **changes)  # type: ignore[arg-type]
        return dataclasses.replace(self.handle, raw=cuda.pack())

    def write_late(self, stream: int, data: bytes, at: int = 0) -> None:
        """A kernel of the owner's that fills a part of the pool."""
        pointer = self.memory.pointer + at
        self.owner.launch(stream, lambda: self.owner.view(pointer, len(data)).__setitem__(slice(None), data))

    def read(self, mapping: CudaIpcMapping, nbytes: int = 1, at: int = 0) -> bytes:
        return bytes(self.peer.view(mapping.pointer + at, nbytes))


def watched_owners() -> int:
    """Descriptors of other processes that this one has."""
    found = 0
    for fd in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found += "pidfd" in os.readlink(fd)
    return found


def a_pair(gpus: int = 1, *, p2p: bool = True, owner: list[int] | None = None, peer: list[int] | None = None) -> Pair:
    """`owner`, `peer`: the GPUs that they see."""
    machine = FakeMachine(gpus, p2p=p2p)
    return Pair(machine, machine.process(owner), machine.process(peer))


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = a_pair()
    yield pair
    pair.memory.close()
    pair.machine.assert_nothing_left()


# --- the owner's memory


def test_a_pool_is_device_memory_that_torch_sees_as_bytes(pair: Pair) -> None:
    assert isinstance(pair.memory, DeviceMemory)
    assert not isinstance(pair.memory, HostMemory)
    interface = pair.memory.__cuda_array_interface__
    assert interface["shape"] == (SIZE,)
    assert interface["typestr"] == "|u1"
    assert interface["data"] == (pair.memory.pointer, False)
    assert interface["version"] == 3


@pytest.mark.parametrize("size", [1, (2 << 20) - OFFSET - 16, (2 << 20) - OFFSET - 15, 5 << 20])
def test_a_pool_shares_its_two_mebibytes_with_nobody(size: int) -> None:
    machine = FakeMachine()
    process = machine.process()
    memory = CudaIpcMemory(size, 0, process)
    assert machine.used(0) % (2 << 20) == 0
    assert OFFSET + size + 16 <= machine.used(0) < OFFSET + size + 16 + (2 << 20)
    memory.close()
    machine.assert_nothing_left()


def test_a_pool_of_no_bytes_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one byte, not 0"):
        CudaIpcMemory(0, 0, FakeMachine().process())


def test_a_pool_for_which_there_is_no_room_says_how_much_there_is() -> None:
    machine = FakeMachine(memory=4 << 20)
    with pytest.raises(
        CudaError, match=r"no room for a pool of 6291456 bytes on GPU-.*, where 4194304 of 4194304"
    ) as no:
        CudaIpcMemory(5 << 20, 0, machine.process())
    assert no.value.name == "cudaErrorMemoryAllocation"
    machine.assert_nothing_left()


@pytest.mark.parametrize(
    "method", ["set_device", "device_uuid", "malloc", "memset", "memcpy", "event_record", "stream_synchronize"]
)
def test_a_pool_that_cannot_be_made_leaves_nothing_behind(method: str) -> None:
    machine = FakeMachine()
    process = machine.process()
    process.fail(method)
    with pytest.raises(CudaError):
        CudaIpcMemory(SIZE, 0, process)
    machine.assert_nothing_left()


@pytest.mark.parametrize(
    ("method", "after"),
    [("event_create", 0), ("event_create", 7), ("ipc_get_mem_handle", 0), ("ipc_get_event_handle", 7)],
)
def test_a_gpu_that_shares_no_memory_has_a_pool_all_the_same_whose_handle_says_so(method: str, after: int) -> None:
    machine = FakeMachine()
    owner = machine.process()
    owner.fail(method, "cudaErrorNotSupported", after=after)
    memory = CudaIpcMemory(SIZE, 0, owner)
    assert memory.export_error is not None
    assert memory.export_error.name == "cudaErrorNotSupported"
    handle = memory.handle("owner", LAYOUT)
    with pytest.raises(PoolUnreachable, match=r"instance owner .* shares no memory; .*MIG"):
        CudaIpcMapping(handle, machine.process(), 0)
    stream = owner.stream_create()
    memory.wait_fence(stream, memory.record_fence(0))
    owner.stream_destroy(stream)
    CudaIpcMapping(handle, owner, 0).close()  # within its process there is nothing to share
    memory.close()
    machine.assert_nothing_left()


def test_a_pool_is_not_used_after_it_is_closed(pair: Pair) -> None:
    pair.memory.close()
    with pytest.raises(AssertionError):
        _ = pair.memory.__cuda_array_interface__


# --- the handle


def test_a_handle_travels_as_bytes_and_is_small(pair: Pair) -> None:
    cuda = CudaHandle.unpack(pair.handle.raw)
    assert cuda.pack() == pair.handle.raw
    assert cuda.gpu == pair.machine.uuids[0] == pair.memory.uuid
    assert len(cuda.events) == 1 + NUM_FENCES
    assert len(pair.handle.raw) < 1200


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (b"", "not a CUDA pool's handle: 0 bytes"),
        (b"\x01" + bytes(105), "not a CUDA pool's handle: 106 bytes"),
        (b"\x02" + bytes(1192), "handle of version 2, not 1"),
    ],
)
def test_something_that_is_no_handle_is_refused(pair: Pair, raw: bytes, why: str) -> None:
    with pytest.raises(PoolUnreachable, match=f"instance owner cannot be mapped: .*{why}"):
        pair.map(dataclasses.replace(pair.handle, raw=raw))


def test_a_handle_with_another_ring_is_refused(pair: Pair) -> None:
    with pytest.raises(PoolUnreachable, match="another version"):
        pair.map(pair.changed(events=CudaHandle.unpack(pair.handle.raw).events[:-1]))


# --- the handshake


def test_a_pool_is_opened_once_however_often_it_is_mapped(pair: Pair) -> None:
    first, second = pair.map(), pair.map()
    assert first.pointer == second.pointer
    assert pair.peer.held() == {"mappings": 1, "events": 1 + NUM_FENCES}
    first.close()
    assert pair.peer.held() == {"mappings": 1, "events": 1 + NUM_FENCES}
    second.close()
    assert pair.peer.held() == {}
    again = pair.map()
    pair.owner.view(pair.memory.pointer, 1)[:] = b"x"
    assert pair.read(again) == b"x"
    again.close()


@pytest.mark.parametrize(
    ("method", "after"),
    [
        ("set_device", 0),
        ("device_count", 0),
        ("ipc_open_mem_handle", 0),
        ("ipc_open_event_handle", 0),
        ("ipc_open_event_handle", NUM_FENCES),
        ("stream_create", 0),
        ("stream_wait_event", 0),
        ("memcpy_async", 0),
        ("memcpy_async", 1),
        ("stream_synchronize", 0),
        ("stream_synchronize", 1),
    ],
)
def test_whatever_fails_in_opening_is_told_and_closed_again(pair: Pair, method: str, after: int) -> None:
    watched = watched_owners()
    pair.peer.fail(method, "cudaErrorMapBufferObjectFailed", after=after)
    with pytest.raises(PoolUnreachable, match=rf"owner \(process \d+, GPU-.*\) cannot be mapped: {method}: .*Failed.*"):
        pair.map()
    assert pair.peer.held() == {}
    assert watched_owners() == watched
    pair.map().close()


@pytest.mark.parametrize("header", [(b"tandemkw", None, SIZE), (MAGIC, b"n" * 16, SIZE), (MAGIC, None, SIZE + 1)])
def test_memory_that_another_instance_has_taken_is_refused(pair: Pair, header: tuple[bytes, bytes | None, int]) -> None:
    magic, nonce, size = header
    nonce = nonce or CudaHandle.unpack(pair.handle.raw).nonce
    start = pair.memory.pointer - OFFSET
    pair.owner.view(start, HEADER.size)[:] = HEADER.pack(magic, nonce, size)
    with pytest.raises(PoolUnreachable, match="is gone: another instance's memory has taken its place"):
        pair.map()
    assert pair.peer.held() == {}


def test_memory_that_is_not_the_pools_to_its_end_is_refused(pair: Pair) -> None:
    pair.owner.view(pair.memory.pointer + SIZE, 1)[:] = b"?"
    with pytest.raises(PoolUnreachable, match=f"not to the end of its {SIZE} bytes"):
        pair.map()
    assert pair.peer.held() == {}


def test_the_event_that_opening_waits_for_was_recorded_behind_the_first_writes(pair: Pair) -> None:
    """One that was not would let everybody pass."""
    birth = pair.machine.handles[CudaHandle.unpack(pair.handle.raw).events[0]]
    assert isinstance(birth, Event)
    assert birth.mark is not None
    assert birth.mark.is_done


def test_opening_does_not_wait_for_what_the_owner_computes(pair: Pair) -> None:
    done: list[bool] = []
    stream = pair.owner.stream_create()
    for _ in range(NUM_FENCES):
        pair.owner.launch(stream, lambda: done.append(True))
        pair.memory.record_fence(stream)
    mapping = pair.map()
    assert done == []
    mapping.close()
    pair.owner.stream_destroy(stream)


def test_a_pool_of_a_dead_process_cannot_be_mapped(pair: Pair) -> None:
    with subprocess.Popen(["true"]) as process:
        pass
    with pytest.raises(PoolUnreachable, match=r"cannot be opened: .*No such process; is it alive"):
        pair.map(pair.changed(pid=process.pid))
    with pytest.raises(PoolUnreachable, match="cannot be opened"):
        pair.map(pair.changed(pid=2**64 - 1))


def test_a_process_without_a_pool_of_its_own_cannot_map_others(monkeypatch: pytest.MonkeyPatch, pair: Pair) -> None:
    monkeypatch.setattr(CudaIpcMemory, "of_this_process", lambda: None)
    with pytest.raises(PoolUnreachable, match="this process has no pool on one"):
        CudaIpcMapping(pair.handle)


def test_a_process_reads_with_the_gpu_of_its_own_pool() -> None:
    machine = FakeMachine(2)
    process = machine.process()
    memory = CudaIpcMemory(SIZE, 1, process)
    mapping = CudaIpcMapping(memory.handle("self", LAYOUT))  # the pool made last is the process's
    assert mapping.pointer == memory.pointer
    mapping.close()
    memory.close()
    machine.assert_nothing_left()


# --- which GPU


def map_once(pair: Pair) -> None:
    mapping = pair.map()
    pair.owner.view(pair.memory.pointer, 1)[:] = b"x"
    assert pair.read(mapping) == b"x"
    mapping.close()
    pair.memory.close()
    pair.machine.assert_nothing_left()


def test_one_gpu_is_known_by_its_uuid_whatever_it_is_numbered() -> None:
    map_once(a_pair(2, p2p=False, owner=[1], peer=[1, 0]))
    map_once(a_pair(2, p2p=False, owner=[1, 0], peer=[1]))


def test_another_gpu_is_read_where_there_is_a_way() -> None:
    map_once(a_pair(2, owner=[1, 0], peer=[0, 1]))
    map_once(a_pair(2, owner=[1], peer=[0]))  # masked: it is not seen here, and is reached all the same


def test_another_gpu_without_a_way_to_it_is_refused_before_anything_is_opened() -> None:
    pair = a_pair(2, p2p=False, owner=[1], peer=[0, 1])
    pair.peer.fail("ipc_open_mem_handle", "not to be called")
    with pytest.raises(PoolUnreachable, match=r"cannot be read from GPU-.*: there is no peer-to-peer access"):
        pair.map()
    assert pair.peer.held() == {}


def test_another_gpu_that_is_masked_and_without_a_way_is_refused_by_cuda() -> None:
    pair = a_pair(2, p2p=False, owner=[1], peer=[0])
    with pytest.raises(PoolUnreachable, match="no access between these devices"):
        pair.map()
    assert pair.peer.held() == {}


# --- within one process


def test_within_one_process_a_mapping_is_the_memory_itself_and_keeps_it(pair: Pair) -> None:
    mapping = CudaIpcMapping(pair.handle, pair.owner, 0)
    assert mapping.owner_fd is None
    assert mapping.pointer == pair.memory.pointer
    pair.memory.close()
    assert pair.owner.held() != {}
    mapping.close()
    assert pair.owner.held() == {}


def test_another_gpu_of_the_same_process_is_refused() -> None:
    pair = a_pair(2)
    with pytest.raises(PoolUnreachable, match="give each GPU a process of its own"):
        CudaIpcMapping(pair.handle, pair.owner, 1)


# --- fences


def test_a_peer_that_does_not_wait_reads_what_was_there_before(pair: Pair) -> None:
    stream = pair.owner.stream_create()
    mapping = pair.map()
    pair.write_late(stream, b"new")
    fence = pair.memory.record_fence(stream)
    assert pair.read(mapping, 3) == bytes(3), "the trap that fences are for"
    mapping.wait_fence(0, fence)
    assert pair.read(mapping, 3) == b"new"
    mapping.close()
    pair.owner.stream_destroy(stream)


def test_a_fence_stands_for_all_work_before_it_and_for_none_after(pair: Pair) -> None:
    stream = pair.owner.stream_create()
    mapping = pair.map()
    for at in range(4):
        pair.write_late(stream, b"x", at)
        fence = pair.memory.record_fence(stream)
    pair.write_late(stream, b"x", 4)
    mapping.wait_fence(0, fence)
    assert pair.read(mapping, 5) == b"xxxx\0"
    mapping.close()
    pair.owner.stream_destroy(stream)


def test_fences_are_used_again_in_turn_and_never_let_a_late_reader_pass_early(pair: Pair) -> None:
    stream = pair.owner.stream_create()
    mapping = pair.map()
    for step in range(3 * NUM_FENCES):
        pair.write_late(stream, bytes([step]))
        fence = pair.memory.record_fence(stream)
        assert fence == step % NUM_FENCES
        if step % 5 == 0:
            mapping.wait_fence(0, fence)
            assert pair.read(mapping) == bytes([step])
    # Announced long ago, and its event recorded again since: the reader waits for the later step.
    mapping.wait_fence(0, (fence + 1) % NUM_FENCES)
    assert pair.read(mapping)[0] >= 3 * NUM_FENCES - NUM_FENCES
    mapping.close()
    pair.owner.stream_destroy(stream)


@pytest.mark.parametrize("fence", [-1, NUM_FENCES])
def test_a_fence_that_does_not_exist_is_refused(pair: Pair, fence: int) -> None:
    mappings = pair.map(), CudaIpcMapping(pair.handle, pair.owner, 0)
    for mapping in mappings:
        with pytest.raises(TransferError, match=rf"fence {fence} is not one of {NUM_FENCES}"):
            mapping.wait_fence(0, fence)
        mapping.close()


def test_within_one_process_the_reading_stream_waits_and_the_thread_does_not(pair: Pair) -> None:
    owner, memory = pair.owner, pair.memory
    writing, reading = owner.stream_create(), owner.stream_create()
    seen: list[bytes] = []
    mapping = CudaIpcMapping(pair.handle, owner, 0)
    pair.write_late(writing, b"new")
    mapping.wait_fence(reading, memory.record_fence(writing))
    owner.launch(reading, lambda: seen.append(bytes(owner.view(mapping.pointer, 3))))
    assert seen == []
    owner.stream_synchronize(reading)
    assert seen == [b"new"]
    mapping.close()
    for stream in (writing, reading):
        owner.stream_destroy(stream)


@pytest.mark.parametrize("waits", [False, True])
def test_a_pull_waits_for_steps_that_still_read_the_blocks_it_overwrites(pair: Pair, waits: bool) -> None:
    owner, memory = pair.owner, pair.memory
    steps, pulls = owner.stream_create(), owner.stream_create()
    memory.wait_own_fence(pulls)  # nothing is marked yet: nothing to wait for
    read_by_step: list[bytes] = []
    owner.launch(steps, lambda: read_by_step.append(bytes(owner.view(memory.pointer, 3))))
    memory.record_fence(steps)
    if waits:
        memory.wait_own_fence(pulls)
    pair.write_late(pulls, b"new")
    owner.stream_synchronize(pulls)
    owner.stream_synchronize(steps)
    assert read_by_step == [bytes(3) if waits else b"new"]
    for stream in (steps, pulls):
        owner.stream_destroy(stream)


@pytest.fixture
def owner_process() -> Iterator["subprocess.Popen[bytes]"]:
    """A real process, whose death is the played one's."""
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def test_a_fence_of_an_owner_that_was_killed_is_not_waited_for(
    pair: Pair, owner_process: "subprocess.Popen[bytes]"
) -> None:
    stream = pair.owner.stream_create()
    mapping = pair.map(pair.changed(pid=owner_process.pid))
    reached = pair.memory.record_fence(stream)
    pair.owner.stream_synchronize(stream)
    pair.write_late(stream, b"new")
    never_reached = pair.memory.record_fence(stream)
    pair.owner.kill()
    owner_process.kill()
    owner_process.wait()
    mapping.wait_fence(0, reached)
    with pytest.raises(TransferError, match=r"instance owner .* was lost: its owner died before it had filled"):
        mapping.wait_fence(0, never_reached)
    mapping.close()


def test_a_stream_that_waited_for_a_killed_owner_would_hang_for_ever(pair: Pair) -> None:
    """Why the thread waits, and not the stream."""
    shared = pair.owner.event_create(interprocess=True)
    event = pair.peer.ipc_open_event_handle(pair.owner.ipc_get_event_handle(shared))
    pair.write_late(0, b"new")
    pair.owner.event_record(shared, 0)
    pair.peer.stream_wait_event(0, event)
    pair.owner.kill()
    with pytest.raises(StuckError):
        pair.peer.stream_synchronize(0)
    pair.peer.kill()


def test_a_fence_that_is_not_reached_is_given_up(monkeypatch: pytest.MonkeyPatch, pair: Pair) -> None:
    monkeypatch.setattr(cuda_peer, "_FENCE_TIMEOUT_S", 0.0)
    stream = pair.owner.stream_create()
    mapping = pair.map()
    for _ in range(10):
        pair.write_late(stream, b"new")
    with pytest.raises(TransferError, match="was not filled in 0 s: does its GPU hang"):
        mapping.wait_fence(0, pair.memory.record_fence(stream))
    mapping.close()
    pair.owner.stream_destroy(stream)


def test_a_fence_that_cannot_be_asked_for_is_a_failed_transfer(pair: Pair) -> None:
    mapping = pair.map()
    pair.peer.fail("event_query", "cudaErrorIllegalAddress")
    with pytest.raises(TransferError, match=r"cannot be waited for: .*cudaErrorIllegalAddress"):
        mapping.wait_fence(0, pair.memory.record_fence(0))
    mapping.close()


# --- ends


def test_a_mapping_is_closed_also_when_the_device_is_lost(pair: Pair) -> None:
    mapping = pair.map()
    fds = mapping.owner_fd
    for method in ("set_device", "event_destroy", "ipc_close_mem_handle"):
        pair.peer.fail(method, "cudaErrorIllegalAddress")
    mapping.close()
    mapping.close()
    assert mapping.owner_fd is None
    assert fds is not None
    with pytest.raises(AssertionError, match="after it was closed"):
        _ = mapping.pointer
    pair.peer.kill()


def test_freeing_a_pool_that_a_peer_has_mapped_is_what_cuda_calls_undefined() -> None:
    """The fake would tell if a worker did: tests of workers end with the machine's check."""
    pair = a_pair()
    mapping = pair.map()
    pair.memory.close()
    mapping.close()
    assert pair.machine.undefined == ["process 0 freed memory that process 1 has mapped"]


@pytest.mark.parametrize("is_killed", [False, True])
def test_two_hundred_restarts_of_an_owner_leave_nothing_behind(is_killed: bool) -> None:
    machine = FakeMachine(memory=4 << 20)  # of which a pool takes the half
    peer = machine.process()
    watched = watched_owners()
    for restart in range(200):
        pair = Pair(machine, machine.process(), peer)
        mapping = pair.map()
        pair.owner.view(pair.memory.pointer, 1)[:] = bytes([restart])
        assert pair.read(mapping) == bytes([restart])
        assert peer.held() == {"mappings": 1, "events": 1 + NUM_FENCES}
        assert watched_owners() == watched + 1
        if is_killed:
            pair.owner.kill()
            assert pair.read(mapping) == bytes([restart])
        mapping.close()
        pair.memory.close()
        assert peer.held() == {}
        assert watched_owners() == watched
        assert machine.used(0) == 0
    machine.assert_nothing_left()


def test_a_stale_handle_that_names_the_next_instances_memory_is_refused_by_its_nonce(pair: Pair) -> None:
    """Same address, same process id, and CUDA's handle names something again: only the nonce tells."""
    after = Pair(pair.machine, pair.machine.process(), pair.peer)
    cuda = CudaHandle.unpack(after.handle.raw)
    with pytest.raises(PoolUnreachable, match="another instance's memory has taken its place"):
        pair.map(pair.changed(memory=cuda.memory, events=cuda.events))
    mapping = pair.map(after.handle)
    mapping.close()
    after.memory.close()


async def test_a_restarted_peer_is_mapped_anew_and_its_old_memory_is_let_go(pair: Pair) -> None:
    pools = PeerPools()
    with importing(pair.peer):
        first = pools.get("peer", pair.handle)
        first.acquire()  # a copy is in flight
        pair.owner.kill()
        after = Pair(pair.machine, pair.machine.process(), pair.peer)
        second = pools.get("peer", after.handle)
        assert pair.peer.held()["mappings"] == 2
        first.release()
        assert first.closed.is_set()
        assert pair.peer.held()["mappings"] == 1
        assert not second.closed.is_set()
        pools.close()
    after.memory.close()
