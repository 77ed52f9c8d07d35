"""Large pages under the weights.

A decode step reads every weight once, and of memory in 4 KiB pages a core finds the addresses more slowly than the
bytes: measured on one Zen 4 core, the matrix products of a step of one request take 1.3 times as long as with pages of
2 MiB. Linux gives those to whoever asks when memory is mapped, but weights are allocated by torch and oneDNN, which do
not. So when a model is loaded its memory is moved: MADV_COLLAPSE (Linux 6.1) copies what is mapped into large pages.
"""

import ctypes
import errno
from collections.abc import Iterator
from pathlib import Path

_PAGE = 2 << 20
# Smaller mappings hold no weights worth it.
_SMALLEST = 2 * _PAGE
_MADV_COLLAPSE = 25
_MAPS = Path("/proc/self/maps")


def collapse_into_huge_pages(maps: Path = _MAPS) -> int:
    """Moves this process's large private mappings into pages of 2 MiB, as far as the kernel has them; bytes moved.

    What cannot be moved (no large page is free, an old kernel, another system) stays as it is: slower, and right. Takes
    about as long as copying the memory.
    """
    try:
        madvise = ctypes.CDLL(None, use_errno=True).madvise
        found = list(_large_mappings(maps.read_text()))
    except (OSError, AttributeError):
        return 0
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    moved = 0
    for start, end in found:
        if madvise(start, end - start, _MADV_COLLAPSE) == 0:
            moved += end - start
        elif ctypes.get_errno() == errno.EINVAL and not moved:
            return 0  # a kernel that does not know the word
    return moved


def _large_mappings(maps: str) -> Iterator[tuple[int, int]]:
    """Addresses of private, writable, anonymous memory, from the first large page in it to the end of the last."""
    for line in maps.splitlines():
        addresses, rights, _, _, inode, *name = line.split()
        if rights != "rw-p" or inode != "0" or (name and name[0] != "[heap]"):
            continue
        start, end = (int(address, 16) for address in addresses.split("-"))
        start, end = -(-start // _PAGE) * _PAGE, end // _PAGE * _PAGE
        if end - start >= _SMALLEST:
            yield start, end
