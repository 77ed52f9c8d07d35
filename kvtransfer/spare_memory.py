"""How much memory of this machine may be taken before anybody needs it.

A quarter of it stays with others, whatever is free now. In a container its limit counts as the machine (cgroup v2; the
groups above it as well, where they can be seen).
"""

from collections.abc import Iterator
from pathlib import Path

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")


def spare_bytes(proc: Path = PROC, cgroups: Path = CGROUPS) -> int:
    """What can be taken and leaves a quarter of the memory available; 0 where it cannot be told."""
    try:
        room = [_of_machine(proc), *_of_groups(proc, cgroups)]
    except (OSError, ValueError, KeyError):
        return 0
    return max(0, min(room))


def _of_machine(proc: Path) -> int:
    lines = (line.split() for line in (proc / "meminfo").read_text().splitlines())
    kibibytes = {name: int(value) for name, value, *_ in lines}
    return 1024 * (kibibytes["MemAvailable:"] - kibibytes["MemTotal:"] // 4)


def _of_groups(proc: Path, cgroups: Path) -> Iterator[int]:
    for line in (proc / "self" / "cgroup").read_text().splitlines():
        hierarchy, _, path = line.split(":", 2)
        if hierarchy != "0":  # version 1
            continue
        group = cgroups / path.lstrip("/")
        for folder in (group, *group.parents):
            limit = folder / "memory.max"
            # The root has none, nor has a group that is shown under another name inside a container.
            if folder.is_relative_to(cgroups) and limit.exists() and (most := limit.read_text().strip()) != "max":
                yield int(most) * 3 // 4 - _used_by(folder)


def _used_by(folder: Path) -> int:
    """Bytes, without pages of files that would be dropped first."""
    stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    return int((folder / "memory.current").read_text()) - int(stat["inactive_file"])
