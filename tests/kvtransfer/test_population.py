"""Pages of pools that are brought in beforehand: all of them, or none where they would be missed elsewhere."""

import gc
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from handoffs import LAYOUT
from kvtransfer.memfd import MemfdMapping, MemfdMemory
from kvtransfer.population import STEP_BYTES, Population
from kvtransfer.spare_memory import spare_bytes

SIZE = 40 << 20
PLENTY = 1 << 40


class Mapped:
    """A mapping of `SIZE` bytes that nobody has touched."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("pages")
        os.ftruncate(self.fd, SIZE)
        self.buffer = memoryview(mmap.mmap(self.fd, SIZE))

    @property
    def num_bytes_taken(self) -> int:
        return os.fstat(self.fd).st_blocks * 512


@pytest.fixture
def mapped() -> Iterator[Mapped]:
    mapped = Mapped()
    yield mapped
    os.close(mapped.fd)


def populate(mapped: Mapped, spare: Callable[[], int], *, missing_bytes: int = SIZE, writable: bool = True) -> None:
    Population(mapped.buffer, missing_bytes, writable=writable, spare=spare).wait()


@pytest.mark.parametrize("writable", [True, False])
def test_all_pages_are_taken_and_are_zero(mapped: Mapped, writable: bool) -> None:
    populate(mapped, lambda: PLENTY, writable=writable)
    assert mapped.num_bytes_taken == SIZE
    assert mapped.buffer == bytes(SIZE)


def test_what_is_written_already_stays(mapped: Mapped) -> None:
    mapped.buffer[SIZE - 1] = 7
    populate(mapped, lambda: PLENTY)
    assert mapped.buffer[SIZE - 1] == 7


def test_a_pool_that_does_not_fit_into_what_is_spare_is_not_touched(mapped: Mapped) -> None:
    populate(mapped, lambda: SIZE - 1)
    assert mapped.num_bytes_taken == 0


def test_pages_that_are_memory_already_need_none_to_be_spare(mapped: Mapped) -> None:
    mapped.buffer[:] = bytes([1]) * SIZE
    populate(mapped, lambda: 0, missing_bytes=0)


def test_it_ends_where_others_have_taken_what_was_spare(mapped: Mapped) -> None:
    left = iter([PLENTY, 0])
    populate(mapped, lambda: next(left))
    assert mapped.num_bytes_taken == 16 << 20


def test_it_can_be_ended_in_the_middle(mapped: Mapped) -> None:
    created = threading.Event()

    def stop() -> int:
        assert created.wait(60)
        population.stop()
        return PLENTY

    population = Population(mapped.buffer, SIZE, writable=True, spare=stop)
    created.set()
    population.wait()
    assert mapped.num_bytes_taken == STEP_BYTES
    population.close()
    population.close()


def test_a_pool_takes_its_memory_when_asked_to_and_gives_it_back() -> None:
    memory = MemfdMemory(SIZE)
    handle = memory.handle("owner", LAYOUT)
    memory.populate().wait()
    assert memory.populate() is memory.populate()
    mapping = MemfdMapping(handle)
    mapping.population.wait()
    memory.close()
    assert mapping.buffer == bytes(SIZE)
    mapping.close()


# --- what is spare


def machine(
    folder: Path,
    *,
    group: str = "0::/a/b",
    other: str = "4:cpu,cpuset:/elsewhere",
    available: int = 6_000,
    total: int = 8_000,
) -> Path:
    (folder / "self").mkdir(parents=True)
    (folder / "meminfo").write_text(
        f"MemTotal: {total} kB\nMemFree: 1 kB\nMemAvailable: {available} kB\nHugePages: 0\n"
    )
    (folder / "self" / "cgroup").write_text(f"{other}\n{group}\n")
    return folder


def limited(folder: Path, limit: str, *, current: int = 0, inactive_file: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{current}\n")
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {inactive_file}\n")


def test_a_quarter_of_the_machine_stays_with_others(tmp_path: Path) -> None:
    assert spare_bytes(machine(tmp_path / "1"), tmp_path) == 4_000 * 1024
    assert spare_bytes(machine(tmp_path / "2", available=1_999), tmp_path) == 0


def test_a_containers_limit_counts_as_its_machine(tmp_path: Path) -> None:
    limited(tmp_path / "groups" / "a" / "b", "4000", current=1500, inactive_file=500)
    assert spare_bytes(machine(tmp_path / "proc"), tmp_path / "groups") == 2_000
    limited(tmp_path / "groups" / "a", "2000", current=1500, inactive_file=500)
    assert spare_bytes(machine(tmp_path / "other"), tmp_path / "groups") == 500


def test_a_group_without_a_limit_or_out_of_sight_limits_nothing(tmp_path: Path) -> None:
    limited(tmp_path / "groups" / "a" / "b", "max")
    assert spare_bytes(machine(tmp_path / "proc"), tmp_path / "groups") == 4_000 * 1024
    assert spare_bytes(machine(tmp_path / "moved", group="0::/../../x"), tmp_path / "groups") == 4_000 * 1024


UNLIMITED = 2**63 - 4096  # as version 1 says it


def limited_by_version_1(folder: Path, limit: int, *, usage: int = 0, inactive_file: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.limit_in_bytes").write_text(f"{limit}\n")
    (folder / "memory.usage_in_bytes").write_text(f"{usage}\n")
    (folder / "memory.stat").write_text(f"inactive_file 1\ntotal_inactive_file {inactive_file}\n")


def test_limits_of_version_1_count_as_those_of_version_2(tmp_path: Path) -> None:
    proc, groups = machine(tmp_path / "proc", other="4:hugetlb,memory:/a/b"), tmp_path / "groups"
    limited_by_version_1(groups / "memory", UNLIMITED, usage=9_000_000)
    limited_by_version_1(groups / "memory" / "a", UNLIMITED)
    limited_by_version_1(groups / "memory" / "a" / "b", UNLIMITED)
    assert spare_bytes(proc, groups) == 4_000 * 1024
    limited_by_version_1(groups / "memory" / "a" / "b", 4000, usage=1500, inactive_file=500)
    assert spare_bytes(proc, groups) == 2_000
    limited_by_version_1(groups / "memory" / "a", 2000, usage=1500, inactive_file=500)
    assert spare_bytes(proc, groups) == 500


def test_a_container_whose_group_is_shown_as_the_root_of_version_1_is_limited_by_it(tmp_path: Path) -> None:
    proc = machine(tmp_path / "proc", other="4:memory:/docker/0123")
    limited_by_version_1(tmp_path / "groups" / "memory", 4000, usage=1000)
    assert spare_bytes(proc, tmp_path / "groups") == 2_000


def test_nothing_is_spare_where_it_cannot_be_told(tmp_path: Path) -> None:
    assert spare_bytes(tmp_path / "nowhere", tmp_path) == 0
    out_of_sight = machine(tmp_path / "proc", other="4:memory:/a")
    assert spare_bytes(out_of_sight, tmp_path / "groups") == 0
    limited_by_version_1(tmp_path / "groups" / "memory", UNLIMITED)
    (tmp_path / "groups" / "memory" / "memory.usage_in_bytes").unlink()
    assert spare_bytes(out_of_sight, tmp_path / "groups") == 0


def test_a_mapping_whose_population_cannot_begin_leaves_no_file_open(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_thread(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    memory = MemfdMemory(1 << 20)
    gc.collect()  # what other tests have left
    open_before = set(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(threading.Thread, "start", no_thread)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        MemfdMapping(memory.handle("owner", LAYOUT))
    gc.collect()  # what was raised holds the mapping
    assert set(os.listdir("/proc/self/fd")) <= open_before
    memory.close()


def test_this_machine_can_tell() -> None:
    assert 0 <= spare_bytes() < PLENTY
