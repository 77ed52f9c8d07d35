"""A pool in a memfd: memory without a name, that a peer can map while its owner lives.

    owner                                              peer
    memfd_create, sized, sealed against resizing       readlink /proc/<pid>/fd/<n>: is it one of ours?
    header: magic, nonce, size                         open, check seals and size, read the header: is it the right one?
    pool from `offset` on, mapped shared               map the pool, read-only

Nothing is in /dev/shm, so nothing can be left behind there: the kernel frees the memory with the last mapping, however
the processes died. Pages are zero, and take memory only when touched, by whoever uses them or by `populate`. Process
ids and file descriptors are reused; the nonce in the header is not, so it proves that what was opened is what the
handle means. The seals make sure that the memory cannot shrink under a peer's copy (SIGBUS). A peer outlives its owner
safely: the memory stays while it is mapped.
"""

import fcntl
import mmap
import os
import secrets
import struct
from contextlib import suppress

from engine.memory import KVLayout
from kvtransfer.copier import HostCopies
from kvtransfer.errors import PoolUnreachable
from kvtransfer.handle import PoolHandle
from kvtransfer.population import Population

KIND = "memfd"

_NAME = "tandem-kv"
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL

# Handle's `raw`: process id, file descriptor, nonce.
_RAW = struct.Struct("<QQ16s")
# First bytes of the memory: magic, nonce, size of the pool.
_HEADER = struct.Struct("<8s16sQ")
_MAGIC = b"tandemkv"

# The header has a page of its own, so that the pool starts at a page. Of 2 MiB: where shared memory may have such (the
# kernel's `transparent_hugepage/shmem_enabled` is at least `advise`) copies are 1.2 times as fast; elsewhere the gap
# takes no memory.
_OFFSET = 2 << 20


class MemfdMemory:
    """Memory of a pool that other processes of this host can map. Implements `ExportedMemory`."""

    def __init__(self, nbytes: int) -> None:
        """Reserves `nbytes`; they take memory only as they are touched.

        Raises:
            ValueError: nbytes is not above 0.
            OSError: the kernel does not give them.
        """
        if nbytes <= 0:
            raise ValueError(f"a pool has at least one byte, not {nbytes}")
        self.nbytes = nbytes
        self._population: Population | None = None
        self._nonce = secrets.token_bytes(16)
        self._fd = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self._fd, _OFFSET + nbytes)
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, _SEALS)
            os.pwrite(self._fd, _HEADER.pack(_MAGIC, self._nonce, nbytes), 0)
            # Only the pool: a stray write below it cannot reach the header.
            mapped = mmap.mmap(self._fd, nbytes, mmap.MAP_SHARED, offset=_OFFSET)
            _ask_for_huge_pages(mapped)
            self.buffer = memoryview(mapped)
        except BaseException:
            os.close(self._fd)
            raise

    def populate(self) -> Population:
        """Begins to take the memory, so that no step and no copy waits for it; see `population`."""
        if self._population is None:
            self._population = Population(self.buffer, self.nbytes, writable=True)
        return self._population

    def handle(self, instance_id: str, layout: KVLayout) -> PoolHandle:
        """How peers map it; valid until `close`."""
        raw = _RAW.pack(os.getpid(), self._fd, self._nonce)
        return PoolHandle(instance_id, KIND, raw, _OFFSET, self.nbytes, layout.bytes_per_block, layout.fingerprint)

    def copies(self, layout: KVLayout) -> HostCopies:
        """How peers' blocks are copied into it."""
        return HostCopies(self.buffer, layout.bytes_per_block)

    def close(self) -> None:
        """Takes it from peers to come, and forgets it: the memory is freed when the last view and mapping are gone."""
        if self._population is not None:
            self._population.close()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        self.buffer = memoryview(b"")


class MemfdMapping:
    """A peer's pool, mapped read-only. Implements `mapping.HostMapping`."""

    def __init__(self, handle: PoolHandle) -> None:
        """
        Raises:
            PoolUnreachable: the owner is gone, on another host or in another process namespace, or not accessible.
        """
        try:
            pid, fd, nonce = _RAW.unpack(handle.raw)
        except struct.error as error:
            raise PoolUnreachable(f"not a memfd handle: {len(handle.raw)} bytes") from error
        path = f"/proc/{pid}/fd/{fd}"
        where = f"the pool of instance {handle.instance_id} (process {pid})"
        try:
            # Opening something else (a terminal, a pipe) could block, or have effects: ask for the name first.
            name = os.readlink(path)
            if not name.startswith(f"/memfd:{_NAME}"):
                raise PoolUnreachable(f"{where} is gone: {path} is {name}")
            opened = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise PoolUnreachable(f"{where} cannot be opened: {error}; is it alive, and on this host?") from error
        try:
            self._check(opened, handle, nonce, where)
            mapped = mmap.mmap(opened, handle.size, mmap.MAP_SHARED, mmap.PROT_READ, offset=handle.offset)
            num_bytes_taken = 512 * os.fstat(opened).st_blocks
            self._owner = os.pidfd_open(pid)
        except OSError as error:
            raise PoolUnreachable(f"{where} cannot be mapped: {error}") from error
        finally:
            os.close(opened)
        _ask_for_huge_pages(mapped)
        self.buffer = memoryview(mapped)
        # What its owner has not touched yet, it will.
        try:
            self.population = Population(self.buffer, max(0, handle.size - num_bytes_taken), writable=False)
        except BaseException:  # no thread can be started
            os.close(self._owner)
            raise

    @staticmethod
    def _check(opened: int, handle: PoolHandle, nonce: bytes, where: str) -> None:
        size = os.fstat(opened).st_size
        header = os.pread(opened, _HEADER.size, 0)
        if len(header) < _HEADER.size or _HEADER.unpack(header) != (_MAGIC, nonce, handle.size):
            raise PoolUnreachable(f"{where} is gone: another instance's memory has taken its place")
        if handle.offset != _OFFSET or size != _OFFSET + handle.size:
            raise PoolUnreachable(f"{where} has {size} bytes, not {handle.offset} + {handle.size}")
        if fcntl.fcntl(opened, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
            raise PoolUnreachable(f"{where} is not sealed: it could shrink under a copy")

    @property
    def owner_fd(self) -> int:
        """Becomes readable when the owner's process has died."""
        return self._owner

    def close(self) -> None:
        """Unmaps it, with the last view of it. Idempotent."""
        self.population.close()
        if self._owner >= 0:
            os.close(self._owner)
            self._owner = -1
        self.buffer = memoryview(b"")


def _ask_for_huge_pages(mapped: mmap.mmap) -> None:
    with suppress(OSError):  # a kernel without
        mapped.madvise(mmap.MADV_HUGEPAGE)
