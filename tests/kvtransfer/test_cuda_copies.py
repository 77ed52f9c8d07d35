"""Copies into and out of a pool on a GPU, over a played CUDA that does all work as late as it may."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.memory import KVLayout
from fake_block_kernel import FakeBlockKernel
from fake_cuda import FakeMachine, FakeProcess
from handoffs import LAYOUT
from kvtransfer import cuda_copies
from kvtransfer.copier import runs
from kvtransfer.cuda_copies import CudaCopies, CudaStagingCopies
from kvtransfer.cuda_ipc import CudaIpcMapping, CudaIpcMemory
from kvtransfer.errors import TransferError
from kvtransfer.loopback import LoopbackMemory
from kvtransfer.mapping import PeerPool, open_mapping
from kvtransfer.memfd import MemfdMemory

NUM_BLOCKS = 16
BYTES = LAYOUT.bytes_per_block
SIZE = NUM_BLOCKS * BYTES


class Gpus:
    """A holder's process and a consumer's, their pools on GPUs, and copies from the one into the other."""

    def __init__(self, machine: FakeMachine, holder_device: int = 0, device: int = 0) -> None:
        self.machine = machine
        self.steps: list[tuple[FakeProcess, int]] = []  # streams of engines
        self.holder, self.consumer = machine.process(), machine.process()
        self.source = CudaIpcMemory(SIZE, holder_device, self.holder)
        self.target = CudaIpcMemory(SIZE, device, self.consumer)
        self.kernel = FakeBlockKernel(self.consumer)
        self.copies = CudaCopies(self.target, BYTES, self.kernel)
        handle = self.source.handle("holder", LAYOUT)
        self.pool = PeerPool(handle, CudaIpcMapping(handle, self.consumer, device))

    def blocks(self, memory: CudaIpcMemory) -> np.ndarray:
        """As they are now, whatever is in flight: [num_blocks, bytes_per_block]."""
        assert isinstance(memory.runtime, FakeProcess)
        return np.frombuffer(memory.runtime.view(memory.pointer, SIZE), np.uint8).reshape(NUM_BLOCKS, BYTES)

    def number(self) -> None:
        """Block i of the holder holds i + 1 in each byte; the consumer's hold 255."""
        self.blocks(self.source)[:] = np.arange(1, NUM_BLOCKS + 1, dtype=np.uint8)[:, None]
        self.blocks(self.target)[:] = 255

    def step(self, process: FakeProcess, memory: CudaIpcMemory, block_id: int, value: int) -> int:
        """A step of an engine that writes a block and is not waited for; returns its fence."""
        process.set_device(memory.device)
        stream = process.stream_create()
        self.steps.append((process, stream))
        blocks = self.blocks(memory)
        process.launch(stream, lambda: blocks[block_id].fill(value))
        return memory.record_fence(stream)

    def close(self) -> None:
        for process, stream in self.steps:
            process.stream_synchronize(stream)
            process.stream_destroy(stream)
        self.copies.close()
        self.copies.close()
        self.pool.retire()
        self.target.close()
        self.source.close()


@pytest.fixture(params=[(0, 0), (0, 1), (1, 1)], ids=["one GPU", "two GPUs", "the second GPU"])
def gpus(request: pytest.FixtureRequest) -> Iterator[Gpus]:
    gpus = Gpus(FakeMachine(2), *request.param)
    gpus.number()
    yield gpus
    gpus.close()
    gpus.machine.assert_nothing_left()


def on_a_thread(call: Callable[[], object]) -> None:
    """As the copier does: CUDA's current device is another there."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if raised:
        raise raised[0]


# --- out of a pool on a GPU


def test_blocks_are_there_when_the_copy_returns_and_no_other_is_touched(gpus: Gpus) -> None:
    stats = gpus.copies.copy(gpus.pool, [3, 4, 5, 0], [7, 8, 9, 2], None)
    expected = np.full((NUM_BLOCKS, BYTES), 255, np.uint8)
    for target_id, value in ((7, 4), (8, 5), (9, 6), (2, 1)):
        expected[target_id] = value
    assert (gpus.blocks(gpus.target) == expected).all()
    assert (stats.bytes, stats.segments) == (4 * BYTES, 2)
    assert gpus.kernel.num_launches == 1, "however many runs there are"


def test_a_copy_works_on_a_thread_that_has_never_seen_the_gpu(gpus: Gpus) -> None:
    on_a_thread(lambda: gpus.copies.copy(gpus.pool, [3], [7], None))
    assert (gpus.blocks(gpus.target)[7] == 4).all()


def test_blocks_that_are_still_computed_are_waited_for(gpus: Gpus) -> None:
    fence = gpus.step(gpus.holder, gpus.source, 3, 99)
    gpus.copies.copy(gpus.pool, [3], [7], fence)
    assert (gpus.blocks(gpus.target)[7] == 99).all()


def test_who_does_not_wait_for_the_holder_reads_what_was_there_before(gpus: Gpus) -> None:
    gpus.step(gpus.holder, gpus.source, 3, 99)
    gpus.copies.copy(gpus.pool, [3], [7], None)
    assert (gpus.blocks(gpus.target)[7] == 4).all(), "else the test above proves nothing"


def test_steps_that_still_use_a_block_which_was_freed_come_before_the_copy_into_it(gpus: Gpus) -> None:
    gpus.step(gpus.consumer, gpus.target, 7, 13)
    gpus.copies.copy(gpus.pool, [3], [7], None)
    for process, stream in gpus.steps:
        process.stream_synchronize(stream)
    assert (gpus.blocks(gpus.target)[7] == 4).all()


def test_who_does_not_wait_for_the_own_steps_is_overwritten_by_them(
    gpus: Gpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpus.target, "wait_own_fence", lambda stream: None)
    gpus.step(gpus.consumer, gpus.target, 7, 13)
    gpus.copies.copy(gpus.pool, [3], [7], None)
    for process, stream in gpus.steps:
        process.stream_synchronize(stream)
    assert (gpus.blocks(gpus.target)[7] == 13).all(), "else the test above proves nothing"


def test_a_mark_that_does_not_exist_is_refused(gpus: Gpus) -> None:
    with pytest.raises(TransferError, match="fence 400"):
        gpus.copies.copy(gpus.pool, [3], [7], 400)
    assert gpus.kernel.num_launches == 0


@pytest.mark.parametrize(
    ("sources", "targets"), [([NUM_BLOCKS], [0]), ([0], [NUM_BLOCKS]), ([14, 15, 16], [0, 1, 2]), ([-1], [0])]
)
def test_a_block_outside_a_pool_is_refused_before_anything_is_launched(
    gpus: Gpus, sources: list[int], targets: list[int]
) -> None:
    with pytest.raises(ValueError, match=r"blocks \[.*\) are not in a pool of 16"):
        gpus.copies.copy(gpus.pool, sources, targets, None)
    assert gpus.kernel.num_launches == 0


def test_blocks_of_another_size_are_refused(gpus: Gpus) -> None:
    pool = PeerPool(replace(gpus.pool.handle, bytes_per_block=2 * BYTES), gpus.pool.mapping)
    with pytest.raises(ValueError, match="blocks of 128 bytes into blocks of 64"):
        gpus.copies.copy(pool, [0], [0], None)


def test_more_blocks_than_one_launch_takes_are_copied_by_several(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_copies, "MAX_BLOCKS_PER_LAUNCH", 3)
    targets = [5, 4, 3, 2, 9, 8, 7]
    stats = gpus.copies.copy(gpus.pool, range(7), targets, None)
    assert gpus.kernel.num_launches == 3
    assert [int(gpus.blocks(gpus.target)[t][0]) for t in targets] == [1, 2, 3, 4, 5, 6, 7]
    assert stats.bytes == 7 * BYTES


@pytest.mark.parametrize("method", ["set_device", "memcpy_async", "launch", "stream_wait_event", "stream_synchronize"])
def test_whatever_cuda_says_is_the_copys_end_and_the_next_one_works(gpus: Gpus, method: str) -> None:
    gpus.step(gpus.consumer, gpus.target, 1, 13)  # so that there is something to wait for
    gpus.consumer.fail(method, "cudaErrorIllegalAddress")
    with pytest.raises(TransferError, match=r"copying on GPU . failed: .*cudaErrorIllegalAddress"):
        gpus.copies.copy(gpus.pool, [3], [7], None)
    gpus.copies.copy(gpus.pool, [3], [7], None)
    assert (gpus.blocks(gpus.target)[7] == 4).all()


def test_a_copy_that_failed_half_way_has_nothing_in_flight(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_copies, "MAX_BLOCKS_PER_LAUNCH", 1)
    gpus.consumer.fail("memcpy_async", after=1)
    with pytest.raises(TransferError):
        gpus.copies.copy(gpus.pool, [3, 4], [7, 9], None)
    before = gpus.blocks(gpus.target).copy()
    gpus.blocks(gpus.source)[:] = 77
    gpus.consumer._synchronize_device(gpus.consumer._visible[gpus.target.device])
    assert (gpus.blocks(gpus.target) == before).all()


@settings(max_examples=60, deadline=None)
@given(st.permutations(range(NUM_BLOCKS)), st.permutations(range(NUM_BLOCKS)), st.integers(1, NUM_BLOCKS))
def test_each_block_lands_where_it_should(sources: list[int], targets: list[int], count: int) -> None:
    gpus = Gpus(FakeMachine())
    gpus.number()
    stats = gpus.copies.copy(gpus.pool, sources[:count], targets[:count], None)
    expected = np.full((NUM_BLOCKS, BYTES), 255, np.uint8)
    expected[targets[:count]] = gpus.blocks(gpus.source)[sources[:count]]
    assert (gpus.blocks(gpus.target) == expected).all()
    assert stats.segments == len(list(runs(sources[:count], targets[:count])))
    gpus.close()
    gpus.machine.assert_nothing_left()


def test_within_one_process_the_memory_itself_is_read() -> None:
    machine = FakeMachine()
    process = machine.process()
    memory, other = CudaIpcMemory(SIZE, 0, process), CudaIpcMemory(SIZE, 0, process)
    copies = CudaCopies(memory, BYTES, FakeBlockKernel(process))
    handle = other.handle("self", LAYOUT)
    pool = PeerPool(handle, CudaIpcMapping(handle, process, 0))
    process.view(other.pointer + 3 * BYTES, BYTES)[:] = b"\x05" * BYTES
    copies.copy(pool, [3], [7], None)
    assert process.view(memory.pointer + 7 * BYTES, BYTES) == b"\x05" * BYTES
    copies.close()
    pool.retire()
    memory.close()
    other.close()
    machine.assert_nothing_left()


@pytest.mark.parametrize("method", ["stream_create", "malloc"])
def test_a_gpu_that_has_nothing_left_for_copies_says_so_at_once_and_nothing_leaks(method: str) -> None:
    machine = FakeMachine()
    process = machine.process()
    memory = CudaIpcMemory(SIZE, 0, process)
    process.fail(method, "cudaErrorMemoryAllocation")
    with pytest.raises(RuntimeError, match="cudaErrorMemoryAllocation"):
        CudaCopies(memory, BYTES, FakeBlockKernel(process))
    memory.close()
    machine.assert_nothing_left()


def test_a_gpu_that_is_lost_can_still_be_let_go_of() -> None:
    gpus = Gpus(FakeMachine())
    gpus.consumer.kill()
    with pytest.raises(TransferError):
        gpus.copies.copy(gpus.pool, [3], [7], None)
    gpus.copies.close()


# --- out of a pool in host memory


class Host:
    """A pool in host memory, mapped by a consumer whose pool is on a GPU."""

    def __init__(self, memory: MemfdMemory | LoopbackMemory) -> None:
        self.machine = FakeMachine()
        self.consumer = self.machine.process()
        self.source = memory
        self.target = CudaIpcMemory(SIZE, 0, self.consumer)
        self.copies = CudaCopies(self.target, BYTES, FakeBlockKernel(self.consumer))
        handle = memory.handle("holder", LAYOUT)
        self.pool = PeerPool(handle, open_mapping(handle))
        blocks = np.frombuffer(memory.buffer, np.uint8).reshape(NUM_BLOCKS, BYTES)
        blocks[:] = np.arange(1, NUM_BLOCKS + 1, dtype=np.uint8)[:, None]

    def target_block(self, block_id: int) -> bytes:
        return bytes(self.consumer.view(self.target.pointer + block_id * BYTES, BYTES))

    def num_registered(self) -> int:
        """But for the ids' buffer."""
        return self.consumer.held().get("registered", 0) - 1


@pytest.fixture(params=[MemfdMemory, LoopbackMemory])
def host(request: pytest.FixtureRequest) -> Iterator[Host]:
    host = Host(request.param(SIZE))
    yield host
    host.copies.close()
    host.pool.retire()
    host.target.close()
    host.source.close()
    host.machine.assert_nothing_left()


def test_blocks_in_host_memory_are_copied_by_runs(host: Host) -> None:
    stats = host.copies.copy(host.pool, [3, 4, 5, 0], [7, 8, 9, 2], None)
    assert [host.target_block(t) for t in (7, 8, 9, 2)] == [bytes([v]) * BYTES for v in (4, 5, 6, 1)]
    assert host.target_block(1) == bytes(BYTES)
    assert (stats.bytes, stats.segments) == (4 * BYTES, 2)


def test_host_memory_is_pinned_once_and_let_go_before_it_is_unmapped(host: Host) -> None:
    assert host.num_registered() == 0
    for _ in range(3):
        host.copies.copy(host.pool, [3], [7], None)
        assert host.num_registered() == 1
    host.pool.acquire()
    host.pool.retire()
    host.copies.copy(host.pool, [4], [8], None)
    host.pool.release()
    assert host.num_registered() == 0
    assert host.target_block(8) == bytes([5]) * BYTES


def test_host_memory_is_let_go_when_the_copies_end_first(host: Host) -> None:
    host.copies.copy(host.pool, [3], [7], None)
    host.copies.close()
    assert host.consumer.held().get("registered", 0) == 0


def test_host_memory_that_cannot_be_pinned_is_copied_all_the_same(host: Host, caplog: pytest.LogCaptureFixture) -> None:
    host.consumer.fail("host_register", "cudaErrorNotSupported")
    for target_id in (7, 8):
        host.copies.copy(host.pool, [3], [target_id], None)
        assert host.target_block(target_id) == bytes([4]) * BYTES
    said = [record.message for record in caplog.records]
    assert len(said) == 1, "once"
    assert said[0].startswith(f"{SIZE} bytes of host memory cannot be pinned, so copies of it are slow: ")
    assert host.num_registered() == 0


def test_a_large_pool_in_host_memory_is_not_pinned(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_copies, "MAX_PINNED_BYTES", SIZE - 1)
    host.copies.copy(host.pool, [3], [7], None)
    assert host.target_block(7) == bytes([4]) * BYTES
    assert host.num_registered() == 0


def test_a_block_outside_a_pool_in_host_memory_is_refused(host: Host) -> None:
    with pytest.raises(ValueError, match=r"source blocks \[16, 17\) are not in a pool of 16"):
        host.copies.copy(host.pool, [NUM_BLOCKS], [0], None)


def test_a_mapping_that_is_neither_of_a_gpu_nor_of_the_host_is_no_source(host: Host) -> None:
    class Nowhere:
        owner_fd = None

        def close(self) -> None:
            """There is nothing."""

    pool = PeerPool(replace(host.pool.handle, kind="nowhere"), Nowhere())
    with pytest.raises(TransferError, match="'nowhere' cannot be copied to a GPU"):
        host.copies.copy(pool, [0], [0], None)


# --- out of the own pool, into a staging area


@pytest.fixture
def staging() -> Iterator[tuple[FakeProcess, CudaIpcMemory, memoryview, CudaStagingCopies]]:
    machine = FakeMachine(2)
    process = machine.process()
    memory = CudaIpcMemory(SIZE, 1, process)
    area = MemfdMemory(4 * BYTES)
    copies = CudaStagingCopies(memory, area.buffer, BYTES)
    yield process, memory, area.buffer, copies
    copies.close()
    copies.close()
    area.close()
    memory.close()
    machine.assert_nothing_left()


def test_blocks_come_into_slots_after_the_step_that_fills_them(
    staging: tuple[FakeProcess, CudaIpcMemory, memoryview, CudaStagingCopies],
) -> None:
    process, memory, slots, copies = staging
    process.view(memory.pointer + 3 * BYTES, BYTES)[:] = b"\x03" * BYTES
    stream = process.stream_create()
    block = process.view(memory.pointer + 4 * BYTES, BYTES)
    process.launch(stream, lambda: block.__setitem__(slice(None), b"\x04" * BYTES))
    fence = memory.record_fence(stream)
    on_a_thread(lambda: copies.copy([4, 3], [1, 3], fence))
    assert [bytes(slots[i * BYTES : (i + 1) * BYTES]) for i in range(4)] == [
        bytes([value]) * BYTES for value in (0, 4, 0, 3)
    ]
    assert process.held()["registered"] == 1
    process.stream_destroy(stream)


def test_a_worker_that_never_stages_pins_nothing(
    staging: tuple[FakeProcess, CudaIpcMemory, memoryview, CudaStagingCopies],
) -> None:
    assert "registered" not in staging[0].held()


def test_staging_that_fails_says_so(
    staging: tuple[FakeProcess, CudaIpcMemory, memoryview, CudaStagingCopies],
) -> None:
    process, _, _, copies = staging
    process.fail("memcpy_async")
    with pytest.raises(TransferError, match="copying on GPU 1 failed"):
        copies.copy([4], [1], None)


def test_the_layout_of_a_real_model_is_one_launch_a_copy() -> None:
    # 8B parameters, 16 tokens a block, bfloat16: what a copy may take at once fits one launch, and is many blocks.
    layout = KVLayout(16, 32 * 2 * 8 * 16 * 128 * 2, b"")
    assert 16 < CudaCopies.max_bytes_per_copy // layout.bytes_per_block <= cuda_copies.MAX_BLOCKS_PER_LAUNCH
