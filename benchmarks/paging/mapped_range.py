"""One contiguous virtual range whose pages are mapped on demand: vAttention's idea, with what Linux offers a process.

    pool     a memfd of pages, all in memory from the start; which are free is a list
    range    addresses reserved for the longest context (PROT_NONE, no memory)
    growth   mmap(MAP_FIXED) of one page of the pool onto the range's next addresses
    release  mmap(MAP_FIXED) of nothing over the whole range

Pages are 4 KiB, or 2 MiB: from the kernel's reserve of huge pages if it has some (hugetlb), else by asking it to build
the pool's memory out of huge pages (transparent), which it may or may not do.
"""

import ctypes
import mmap
import os
from enum import Enum

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

# What Python's mmap does not name.
_MAP_FIXED, _MAP_ANONYMOUS, _MAP_NORESERVE, _PROT_NONE = 0x10, 0x20, 0x4000, 0x0
_FAILED = ctypes.c_void_p(-1).value

SMALL_PAGE = 4 << 10  # bytes
HUGE_PAGE = 2 << 20  # bytes


class PageKind(Enum):
    """Where a pool's pages come from."""

    SMALL = "4 KiB"
    HUGETLB = "2 MiB, hugetlb"
    TRANSPARENT = "2 MiB, transparent"
    ASKED = "2 MiB of 4 KiB pages"  # huge ones were asked for, and not given

    @property
    def page_size(self) -> int:
        """Bytes that are mapped at once."""
        return SMALL_PAGE if self is PageKind.SMALL else HUGE_PAGE

    @property
    def touched_at_once(self) -> int:
        """Bytes that one fault brings into the page table."""
        return HUGE_PAGE if self in (PageKind.HUGETLB, PageKind.TRANSPARENT) else SMALL_PAGE


class MappedRange:
    """Addresses for one request, or a part of it. Held by `with`, or until `close`."""

    def __init__(self, size: int, page_size: int) -> None:
        """Reserves `size` bytes, whole pages; none of them has memory yet.

        Raises:
            OSError: the kernel does not give them.
        """
        self.size = -(-size // page_size) * page_size
        self.page_size = page_size
        self._reserved = self.size + page_size  # so that it can begin at a multiple of a page
        flags = mmap.MAP_PRIVATE | _MAP_ANONYMOUS | _MAP_NORESERVE
        self._base = _mmap(None, self._reserved, _PROT_NONE, flags, -1, 0)
        self.address = -(-self._base // page_size) * page_size
        self.num_mapped = 0  # leading pages that have memory

    def map_next(self, fd: int, page: int) -> int:
        """Puts the file's page of this number behind those that are mapped; the address of its first byte.

        Raises:
            OSError: the kernel refuses: among others when the process has `vm.max_map_count` mappings.
        """
        address = self.address + self.num_mapped * self.page_size
        assert self.num_mapped * self.page_size < self.size, f"all {self.num_mapped} pages are mapped"
        flags = mmap.MAP_SHARED | _MAP_FIXED
        _mmap(address, self.page_size, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, page * self.page_size)
        self.num_mapped += 1
        return address

    def clear(self) -> None:
        """Takes all pages out again; the addresses stay reserved."""
        flags = mmap.MAP_PRIVATE | _MAP_ANONYMOUS | _MAP_NORESERVE | _MAP_FIXED
        if self.num_mapped:
            _mmap(self.address, self.num_mapped * self.page_size, _PROT_NONE, flags, -1, 0)
            self.num_mapped = 0

    def close(self) -> None:
        """Gives the addresses back. Idempotent."""
        if self._base:
            _libc.munmap(self._base, self._reserved)
            self._base = self.num_mapped = 0

    def __enter__(self) -> "MappedRange":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class PagePool:
    """Pages to be mapped. Held by `with`, or until `close`."""

    def __init__(self, num_pages: int, *, huge: bool) -> None:
        """Makes the pages, and touches each: what is measured later is mapping, not the kernel's finding of memory.

        Raises:
            OSError: there is not so much memory.
        """
        self.num_pages = num_pages
        self.fd, self.kind = _hugetlb(num_pages) if huge else (-1, PageKind.SMALL)
        if self.fd < 0:
            self.fd = os.memfd_create("tandem-paging", os.MFD_CLOEXEC)
            self.kind = PageKind.ASKED if huge else PageKind.SMALL
        try:
            os.ftruncate(self.fd, num_pages * self.kind.page_size)
            self._touch()
        except BaseException:
            self.close()
            raise

    @property
    def page_size(self) -> int:
        return self.kind.page_size

    def _touch(self) -> None:
        nbytes = self.num_pages * self.page_size
        with MappedRange(nbytes, self.page_size) as whole:
            flags = mmap.MAP_SHARED | _MAP_FIXED
            _mmap(whole.address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, self.fd, 0)
            if self.kind is PageKind.ASKED:
                _libc.madvise(whole.address, nbytes, mmap.MADV_HUGEPAGE)  # refused: they stay small
            ctypes.memset(whole.address, 1, nbytes)
            if self.kind is PageKind.ASKED and _huge_bytes(whole.address) == nbytes:
                self.kind = PageKind.TRANSPARENT

    def close(self) -> None:
        """Idempotent; pages that are still mapped somewhere live until they are not."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __enter__(self) -> "PagePool":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _hugetlb(num_pages: int) -> tuple[int, PageKind]:
    """A memfd of reserved huge pages; -1 if the kernel has not so many."""
    try:
        fd = os.memfd_create("tandem-paging", os.MFD_CLOEXEC | os.MFD_HUGETLB | os.MFD_HUGE_2MB)
    except OSError:
        return -1, PageKind.HUGETLB
    try:
        os.posix_fallocate(fd, 0, num_pages * HUGE_PAGE)
    except OSError:
        os.close(fd)
        return -1, PageKind.HUGETLB
    return fd, PageKind.HUGETLB


def _huge_bytes(address: int) -> int:
    """Of the mapping that begins at `address`: what the kernel maps as huge pages."""
    with open("/proc/self/smaps") as lines:
        found = False
        for line in lines:
            head = line.split(maxsplit=1)[0]
            if "-" in head:
                found = int(head.split("-")[0], 16) == address
            elif found and head == "ShmemPmdMapped:":
                return int(line.split()[1]) << 10
    return 0


def _mmap(address: int | None, size: int, protection: int, flags: int, fd: int, offset: int) -> int:
    mapped = _libc.mmap(address, size, protection, flags, fd, offset)
    if mapped == _FAILED or mapped is None:
        number = ctypes.get_errno()
        raise OSError(number, f"mmap of {size:,} bytes: {os.strerror(number)}")
    return int(mapped)
