"""Memory moved into large pages: what is moved, and that nothing in it changes."""

import re
from pathlib import Path

import numpy as np
import pytest

from engine import huge_pages
from engine.huge_pages import collapse_into_huge_pages

MIB = 1 << 20


def huge_bytes() -> int:
    found = re.search(r"AnonHugePages: +(\d+) kB", Path("/proc/self/smaps_rollup").read_text())
    assert found is not None
    return int(found[1]) * 1024


def test_large_memory_is_moved_and_stays_what_it_was() -> None:
    memory = np.arange(48 * MIB // 8, dtype=np.int64)
    before = huge_bytes()
    moved = collapse_into_huge_pages()
    if moved == 0:
        pytest.skip("this kernel has no large pages to give")
    assert moved >= 40 * MIB
    assert huge_bytes() >= before
    assert (memory == np.arange(len(memory))).all()
    assert collapse_into_huge_pages() >= moved // 2, "a second time is harmless"


def test_only_large_private_anonymous_memory_is_moved(tmp_path: Path) -> None:
    maps = tmp_path / "maps"
    maps.write_text(
        "\n".join(
            (
                "10000000-10800000 rw-p 00000000 00:00 0",  # 8 MiB
                "20001000-20801000 rw-p 00000000 00:00 0 [heap]",  # 6 MiB of it are whole pages
                "30000000-30800000 rw-p 00000000 00:00 0 [stack]",
                "40000000-40800000 r--p 00000000 00:00 0",
                "50000000-50800000 rw-s 00000000 00:01 7 /memfd:tandem-kv (deleted)",
                "60000000-60800000 rw-p 00000000 08:01 9 /lib/libtorch.so",
                "70000000-70300000 rw-p 00000000 00:00 0",  # too small
            )
        )
    )
    found = list(huge_pages._large_mappings(maps.read_text()))
    assert found == [(0x10000000, 0x10800000), (0x20200000, 0x20800000)]


def test_without_a_list_of_mappings_nothing_is_moved(tmp_path: Path) -> None:
    assert collapse_into_huge_pages(tmp_path / "none") == 0
