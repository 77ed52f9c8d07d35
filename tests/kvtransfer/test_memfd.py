"""Pools in a memfd, between processes: mapped by a handle, gone with their owner, never mistaken for another."""

import asyncio
import contextlib
import dataclasses
import os
import select
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from handoffs import LAYOUT
from kvtransfer.errors import PoolUnreachable
from kvtransfer.handle import PoolHandle
from kvtransfer.mapping import PeerPools
from kvtransfer.memfd import MemfdMapping, MemfdMemory

SIZE = 10 * LAYOUT.bytes_per_block

# Owns a pool with a byte in it, says how it is mapped, and lives until its input ends.
OWNER = """
import sys
from engine.memory import KVLayout
from kvtransfer.memfd import MemfdMemory
size = int(sys.argv[1])
memory = MemfdMemory(size)
memory.buffer[size - 1] = 77
handle = memory.handle("owner", KVLayout(4, 64, b"0123456789abcdef"))
print(handle.raw.hex(), handle.offset, flush=True)
sys.stdin.read()
"""


class Owner:
    """Another process that owns a pool."""

    def __init__(self, size: int = SIZE) -> None:
        root = Path(__file__).parents[2]
        self.process = subprocess.Popen(
            [sys.executable, "-c", OWNER, str(size)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=root,
            env={**os.environ, "PYTHONPATH": f"{root}:{root / 'proto'}"},
        )
        assert self.process.stdout is not None
        raw, offset = self.process.stdout.readline().split()
        self.handle = PoolHandle("owner", "memfd", bytes.fromhex(raw), int(offset), size, 64, LAYOUT.fingerprint)

    def kill(self) -> None:
        with self.process:  # waits, and closes its pipes
            self.process.kill()


@pytest.fixture
def owner() -> Iterator[Owner]:
    owner = Owner()
    yield owner
    owner.kill()


def mapped_pools() -> int:
    """Mappings of pools in this process."""
    return Path("/proc/self/maps").read_text().count("memfd:tandem-kv")


def pool_descriptors() -> int:
    """Descriptors of pools and of their owners' processes; others of this process come and go."""
    names = []
    for fd in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            names.append(os.readlink(fd))
    return sum("memfd:tandem-kv" in name or "pidfd" in name for name in names)


def pool_file(handle: PoolHandle) -> os.stat_result:
    """The owner's memfd; its inode is its only name."""
    pid, fd, _ = struct.unpack("<QQ16s", handle.raw)
    return os.stat(f"/proc/{pid}/fd/{fd}")


def users_of(inode: int) -> list[str]:
    """Processes that keep a memfd alive, by a descriptor or a mapping: without any, the kernel has freed it."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            mappings = (process / "maps").read_text().splitlines()
            if any(line.split()[4] == str(inode) and "memfd:tandem-kv" in line for line in mappings):
                found.append(process.name)
            if any(os.stat(fd).st_ino == inode and "tandem-kv" in os.readlink(fd) for fd in (process / "fd").iterdir()):
                found.append(process.name)
        except OSError:
            continue  # it has ended meanwhile
    return found


def test_a_pool_of_another_process_is_mapped_by_its_handle(owner: Owner) -> None:
    mapping = MemfdMapping(owner.handle)
    assert len(mapping.buffer) == SIZE
    assert mapping.buffer[SIZE - 1] == 77
    mapping.close()


def test_a_mapping_of_a_killed_owner_stays_readable_and_its_death_is_noticed(owner: Owner) -> None:
    mapping = MemfdMapping(owner.handle)
    assert select.select([mapping.owner_fd], [], [], 0)[0] == []
    owner.kill()
    assert select.select([mapping.owner_fd], [], [], 10)[0] == [mapping.owner_fd]
    assert mapping.buffer[SIZE - 1] == 77
    mapping.close()


def test_a_pool_of_a_dead_process_cannot_be_mapped(owner: Owner) -> None:
    owner.kill()
    with pytest.raises(PoolUnreachable, match=r"instance owner \(process \d+\) cannot be opened: .*No such file"):
        MemfdMapping(owner.handle)


def test_killing_owners_leaves_no_memory_and_no_file_behind() -> None:
    for _ in range(5):
        owner = Owner()
        inode = pool_file(owner.handle).st_ino
        mapping = MemfdMapping(owner.handle)
        assert set(users_of(inode)) == {str(owner.process.pid), str(os.getpid())}
        owner.kill()
        assert users_of(inode) == [str(os.getpid())]
        mapping.close()
        assert users_of(inode) == []
    assert not [name for name in os.listdir("/dev/shm") if "tandem-kv" in name]


def test_a_handle_of_a_descriptor_that_was_reused_is_refused() -> None:
    first = MemfdMemory(SIZE)
    handle = first.handle("first", LAYOUT)
    first.close()
    second = MemfdMemory(SIZE)  # gets the same descriptor
    assert second.handle("second", LAYOUT).raw[:16] == handle.raw[:16]
    with pytest.raises(PoolUnreachable, match="another instance's memory has taken its place"):
        MemfdMapping(handle)
    second.close()


def raw(pid: int, fd: int, nonce: bytes = bytes(16)) -> bytes:
    return struct.pack("<QQ16s", pid, fd, nonce)


def test_a_handle_of_something_that_is_no_pool_is_refused_without_opening_it(tmp_path: Path) -> None:
    reader, writer = os.pipe()  # opening a pipe anew could block
    file = os.open(tmp_path / "file", os.O_CREAT | os.O_RDWR)
    other = os.memfd_create("something-else")
    template = PoolHandle("peer", "memfd", b"", 4096, SIZE, 64, LAYOUT.fingerprint)
    for fd in (reader, writer, file, other):
        with pytest.raises(PoolUnreachable, match="is gone"):
            MemfdMapping(dataclasses.replace(template, raw=raw(os.getpid(), fd)))
        os.close(fd)
    with pytest.raises(PoolUnreachable, match="not a memfd handle: 3 bytes"):
        MemfdMapping(dataclasses.replace(template, raw=b"abc"))


def test_a_memfd_that_only_looks_like_a_pool_is_refused() -> None:
    nonce = b"n" * 16
    fd = os.memfd_create("tandem-kv-not-really")
    own = MemfdMemory(SIZE)
    offset = own.handle("own", LAYOUT).offset
    own.close()
    handle = PoolHandle("peer", "memfd", raw(os.getpid(), fd, nonce), offset, SIZE, 64, LAYOUT.fingerprint)
    with pytest.raises(PoolUnreachable, match="another instance's memory"):
        MemfdMapping(handle)
    os.pwrite(fd, struct.pack("<8s16sQ", b"tandemkv", nonce, SIZE), 0)
    with pytest.raises(PoolUnreachable, match=rf"bytes, not {offset} \+ 640"):
        MemfdMapping(handle)
    os.ftruncate(fd, offset + SIZE)
    with pytest.raises(PoolUnreachable, match="not sealed: it could shrink under a copy"):
        MemfdMapping(handle)
    os.close(fd)


@pytest.mark.parametrize("change", [{"size": SIZE + 64}, {"size": SIZE - 64}, {"offset": 0}])
def test_a_handle_with_another_size_or_offset_is_refused(change: dict[str, int]) -> None:
    memory = MemfdMemory(SIZE)
    with pytest.raises(PoolUnreachable):
        MemfdMapping(dataclasses.replace(memory.handle("owner", LAYOUT), **change))  # type: ignore[arg-type]
    memory.close()


def test_a_pool_cannot_be_made_smaller_under_its_peers(owner: Owner) -> None:
    pid, fd, _ = struct.unpack("<QQ16s", owner.handle.raw)
    with open(f"/proc/{pid}/fd/{fd}", "r+b") as file, pytest.raises(PermissionError):
        os.ftruncate(file.fileno(), 4096)


def test_a_huge_pool_takes_no_memory_before_it_is_touched() -> None:
    memory = MemfdMemory(1 << 40)
    handle = memory.handle("owner", LAYOUT)
    memory.buffer[1 << 39] = 1
    mapping = MemfdMapping(handle)
    assert mapping.buffer[1 << 39] == 1
    assert pool_file(handle).st_blocks * 512 <= 16 << 20, "a terabyte is reserved, and not more than a few pages taken"
    mapping.close()
    memory.close()


def test_closing_gives_back_descriptors_and_mappings() -> None:
    before = pool_descriptors()
    for _ in range(20):
        memory = MemfdMemory(SIZE)
        mapping = MemfdMapping(memory.handle("owner", LAYOUT))
        assert mapped_pools() == 2
        mapping.close()
        memory.close()
        assert pool_descriptors() == before
    assert mapped_pools() == 0


def test_a_pool_of_no_bytes_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one byte, not 0"):
        MemfdMemory(0)


async def test_the_mapping_of_a_killed_peer_is_closed_by_itself(owner: Owner) -> None:
    pools = PeerPools()
    pool = pools.get("peer", owner.handle)
    assert mapped_pools() == 1
    owner.kill()
    async with asyncio.timeout(10):
        await pool.closed.wait()
    assert mapped_pools() == 0
    assert len(pools) == 0
