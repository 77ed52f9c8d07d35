"""The CUDA that tests play keeps CUDA's rules: what it let pass would be found on a GPU only."""

import ctypes

import pytest

from engine.cuda.runtime import CudaError
from fake_cuda import FakeMachine, FakeProcess

SIZE = 1 << 12


@pytest.fixture
def machine() -> FakeMachine:
    return FakeMachine(2)


def refused(name: str) -> pytest.RaisesExc[CudaError]:
    return pytest.RaisesExc(CudaError, check=lambda error: error.name == name)


def shared(machine: FakeMachine) -> tuple[FakeProcess, FakeProcess, int, bytes]:
    """Owner, peer, address of the owner's memory, its handle."""
    owner, peer = machine.process(), machine.process()
    pointer = owner.malloc(SIZE)
    return owner, peer, pointer, owner.ipc_get_mem_handle(pointer)


def late_write(process: FakeProcess, stream: int, pointer: int, data: bytes) -> None:
    process.launch(stream, lambda: process.view(pointer, len(data)).__setitem__(slice(None), data))


def test_a_process_cannot_open_its_own_handle(machine: FakeMachine) -> None:
    owner, _, _, handle = shared(machine)
    with refused("cudaErrorDeviceUninitialized"):
        owner.ipc_open_mem_handle(handle)


def test_a_handle_is_open_once_in_a_process_and_may_be_opened_again_after_closing(machine: FakeMachine) -> None:
    _, peer, _, handle = shared(machine)
    mapped = peer.ipc_open_mem_handle(handle)
    with refused("cudaErrorAlreadyMapped"):
        peer.ipc_open_mem_handle(handle)
    peer.ipc_close_mem_handle(mapped)
    peer.ipc_close_mem_handle(peer.ipc_open_mem_handle(handle))
    with refused("cudaErrorInvalidValue"):
        peer.ipc_close_mem_handle(mapped)


def test_handles_of_freed_memory_of_killed_processes_and_of_nothing_are_refused(machine: FakeMachine) -> None:
    owner, peer, pointer, handle = shared(machine)
    owner.free(pointer)
    second = owner.ipc_get_mem_handle(owner.malloc(SIZE))
    owner.kill()
    for stale in (handle, second, bytes(64)):
        with refused("cudaErrorInvalidResourceHandle"):
            peer.ipc_open_mem_handle(stale)


def test_only_the_start_of_own_memory_is_exported_and_freed(machine: FakeMachine) -> None:
    owner, peer, pointer, handle = shared(machine)
    mapped = peer.ipc_open_mem_handle(handle)
    for process, address in ((owner, pointer + 256), (peer, mapped), (peer, pointer)):
        with refused("cudaErrorInvalidValue"):
            process.ipc_get_mem_handle(address)
        with refused("cudaErrorInvalidValue"):
            process.free(address)


def test_addresses_streams_and_events_mean_nothing_in_another_process(machine: FakeMachine) -> None:
    owner, peer, pointer, _ = shared(machine)
    with refused("cudaErrorInvalidValue"):
        peer.memset(pointer, 0, 1)
    stream, event = owner.stream_create(), owner.event_create()
    with refused("cudaErrorInvalidResourceHandle"):
        peer.stream_synchronize(stream)
    with refused("cudaErrorInvalidResourceHandle"):
        peer.event_query(event)


def test_copies_and_fills_outside_memory_are_refused(machine: FakeMachine) -> None:
    process = machine.process()
    pointer = process.malloc(SIZE)
    host = ctypes.create_string_buffer(SIZE + 1)
    address = ctypes.addressof(host)
    with refused("cudaErrorInvalidValue"):
        process.memset(pointer, 0, SIZE + 1)
    with refused("cudaErrorInvalidValue"):
        process.memcpy(address, pointer, SIZE + 1)
    with refused("cudaErrorInvalidValue"):
        process.memcpy_async(pointer + 1, address, SIZE, 0)
    process.memcpy(pointer, address, SIZE)
    process.free(pointer)
    with refused("cudaErrorInvalidValue"):
        process.memcpy(address, pointer, 1)


def test_work_that_touches_freed_memory_is_noted_also_if_its_error_is_caught(machine: FakeMachine) -> None:
    process = machine.process()
    pointer, stream = process.malloc(SIZE), process.stream_create()
    event = process.event_create()
    process.free(pointer)
    late_write(process, stream, pointer, b"x")
    process.event_record(event, stream)
    with refused("cudaErrorIllegalAddress"):
        process.event_synchronize(event)
    with pytest.raises(AssertionError, match="work of process 0"):
        machine.assert_nothing_left()


def test_new_memory_and_freed_memory_are_garbage(machine: FakeMachine) -> None:
    owner, peer, pointer, handle = shared(machine)
    assert bytes(owner.view(pointer, 4)) == b"\xa5" * 4
    mapped = peer.ipc_open_mem_handle(handle)
    owner.free(pointer)
    assert bytes(peer.view(mapped, 4)) == b"\xdd" * 4
    assert machine.undefined == ["process 0 freed memory that process 1 has mapped"]


def test_a_wait_for_an_event_that_was_not_recorded_passes_at_once(machine: FakeMachine) -> None:
    process = machine.process()
    pointer = process.malloc(SIZE)
    process.memset(pointer, 0, SIZE)
    writing, reading = process.stream_create(), process.stream_create()
    event = process.event_create()
    seen: list[bytes] = []
    late_write(process, writing, pointer, b"x")
    assert process.event_query(event)
    process.stream_wait_event(reading, event)
    process.event_record(event, writing)  # too late for the wait above
    process.launch(reading, lambda: seen.append(bytes(process.view(pointer, 1))))
    process.stream_synchronize(reading)
    process.stream_wait_event(reading, event)
    process.launch(reading, lambda: seen.append(bytes(process.view(pointer, 1))))
    process.stream_synchronize(reading)
    assert seen == [b"\0", b"x"]


def test_asking_for_an_event_lets_time_pass(machine: FakeMachine) -> None:
    process = machine.process()
    done: list[int] = []
    event = process.event_create()
    for step in range(3):
        process.launch(0, lambda step=step: done.append(step))
    process.event_record(event, 0)
    answers = [process.event_query(event) for _ in range(5)]
    assert answers == [False, False, False, True, True]
    assert done == [0, 1, 2]


def test_what_gives_memory_back_waits_for_the_device(machine: FakeMachine) -> None:
    owner, peer, pointer, handle = shared(machine)
    mapped = peer.ipc_open_mem_handle(handle)
    seen: list[str] = []
    stream = peer.stream_create()
    peer.launch(stream, lambda: seen.append("peer"))
    peer.stream_destroy(stream)  # does not wait
    assert seen == []
    peer.ipc_close_mem_handle(mapped)
    owner.launch(owner.stream_create(), lambda: seen.append("owner"))
    owner.free(pointer)
    assert seen == ["peer", "owner"]


def test_copies_of_registered_host_memory_are_late_and_of_other_memory_at_once(machine: FakeMachine) -> None:
    process = machine.process()
    pointer, stream = process.malloc(SIZE), process.stream_create()
    process.memset(pointer, 7, SIZE)
    host = ctypes.create_string_buffer(SIZE)
    address = ctypes.addressof(host)
    process.host_register(address, SIZE)
    process.memcpy_async(address, pointer, SIZE, stream)
    assert host.raw == bytes(SIZE)
    process.stream_synchronize(stream)
    assert host.raw == b"\7" * SIZE
    process.memcpy_async(address, pointer, SIZE, stream)
    process.host_unregister(address)
    with refused("cudaErrorIllegalAddress"):
        process.stream_synchronize(stream)
    process.memset(pointer, 8, SIZE)
    process.memcpy_async(address, pointer, SIZE, stream)
    assert host.raw == b"\x08" * SIZE


def test_events_of_one_process_alone_have_no_handle(machine: FakeMachine) -> None:
    owner, peer = machine.process(), machine.process()
    with refused("cudaErrorInvalidResourceHandle"):
        owner.ipc_get_event_handle(owner.event_create())
    handle = owner.ipc_get_event_handle(owner.event_create(interprocess=True))
    with refused("cudaErrorDeviceUninitialized"):
        owner.ipc_open_event_handle(handle)
    with refused("cudaErrorInvalidResourceHandle"):
        peer.ipc_get_event_handle(peer.ipc_open_event_handle(handle))


def test_using_an_event_that_its_owner_has_destroyed_is_noted(machine: FakeMachine) -> None:
    owner, peer = machine.process(), machine.process()
    event = owner.event_create(interprocess=True)
    opened = peer.ipc_open_event_handle(owner.ipc_get_event_handle(event))
    owner.event_destroy(event)
    peer.event_query(opened)
    assert machine.undefined == ["process 1 uses an event that process 0 has destroyed"]
    peer.event_destroy(opened)


def test_the_current_device_is_the_threads_and_counts_for_memory_streams_and_events(machine: FakeMachine) -> None:
    process = machine.process([1, 0])
    process.set_device(1)
    process.malloc(SIZE)
    assert machine.used(0) == SIZE
    event = process.event_create()
    process.set_device(0)
    with refused("cudaErrorInvalidResourceHandle"):
        process.event_record(event, process.stream_create())
    with refused("cudaErrorInvalidDevice"):
        process.set_device(2)


@pytest.mark.parametrize("left", ["allocations", "mappings", "events", "streams", "registered"])
def test_what_is_not_given_back_is_reported(machine: FakeMachine, left: str) -> None:
    _, peer, _, handle = shared(machine)
    host = ctypes.create_string_buffer(SIZE)
    make = {
        "allocations": lambda: peer.malloc(SIZE),
        "mappings": lambda: peer.ipc_open_mem_handle(handle),
        "events": lambda: peer.event_create(),
        "streams": lambda: peer.stream_create(),
        "registered": lambda: peer.host_register(ctypes.addressof(host), SIZE),
    }
    make[left]()
    with pytest.raises(AssertionError, match=f"'process 1': {{'{left}': 1}}"):
        machine.assert_nothing_left()


def test_a_killed_process_leaves_only_what_others_have_mapped(machine: FakeMachine) -> None:
    owner, peer, pointer, handle = shared(machine)
    owner.memset(pointer, 7, SIZE)
    owner.malloc(SIZE)
    mapped = peer.ipc_open_mem_handle(handle)
    late_write(owner, 0, pointer, b"never")
    owner.kill()
    assert machine.used(0) == SIZE
    assert bytes(peer.view(mapped, 5)) == b"\7" * 5
    with refused("cudaErrorContextIsDestroyed"):
        owner.malloc(SIZE)
    peer.ipc_close_mem_handle(mapped)
    machine.assert_nothing_left()
