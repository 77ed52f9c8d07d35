"""How much memory of this machine may be taken before anybody needs it.

A quarter of it stays with others, whatever is free now. In a container its limit counts as the machine (the groups
above it as well, where they can be seen). Limits are cgroup v2's or, where a v1 hierarchy has the memory controller,
those of that hierarchy: https://docs.kernel.org/admin-guide/cgroup-v1/memory.html.
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
        hierarchy, controllers, path = line.split(":", 2)
        if hierarchy == "0":
            yield from _of_version_2(cgroups, path)
        elif "memory" in controllers.split(","):
            yield from _of_version_1(cgroups / "memory", path)


def _of_version_2(root: Path, path: str) -> Iterator[int]:
    for folder in _group_and_above(root, path):
        limit = folder / "memory.max"
        # The root has none, nor has a group that is shown under another name inside a container.
        if limit.exists() and (most := limit.read_text().strip()) != "max":
            yield int(most) * 3 // 4 - _used(folder, "memory.current", "inactive_file")


def _of_version_1(root: Path, path: str) -> Iterator[int]:
    """
    Raises:
        OSError: the hierarchy is not shown where it usually is, so that a limit could be missed.
    """
    for folder in _group_and_above(root, path):
        # Inside a container the group may be shown as the root, and its path lead nowhere. The root has a limit, too;
        # where there is none, it is about 2**63, and other room is less.
        if folder == root or folder.exists():
            most = int((folder / "memory.limit_in_bytes").read_text())
            yield most * 3 // 4 - _used(folder, "memory.usage_in_bytes", "total_inactive_file")


def _group_and_above(root: Path, path: str) -> Iterator[Path]:
    group = root / path.lstrip("/")
    return (folder for folder in (group, *group.parents) if folder.is_relative_to(root))


def _used(folder: Path, usage: str, droppable: str) -> int:
    """Bytes, without pages of files that would be dropped first."""
    stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    return int((folder / usage).read_text()) - int(stat[droppable])
