"""Who computes while something is measured: processor time of the processes of this machine, read from /proc.

A benchmark whose client and server share cores says by it what either took, and whether anything else ran beside them.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Process:
    parent: int
    name: str  # as it calls itself, its arguments left out
    seconds: float  # of processor time, in user and kernel mode, since it began


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All processes at one moment."""

    processes: dict[int, Process]
    busy_s: float  # of all cores since the machine began, with those that have ended, and what its host took

    @classmethod
    def take(cls, proc: Path = Path("/proc")) -> "Snapshot":
        """
        Args:
            proc: where Linux shows its processes.
        """
        found = ((int(folder.name), _read(folder)) for folder in proc.iterdir() if folder.name.isdecimal())
        return cls({pid: process for pid, process in found if process is not None}, _busy_s(proc))

    def below(self, root: int) -> set[int]:
        """Descendants of a process."""
        children: dict[int, list[int]] = {}
        for pid, process in self.processes.items():
            children.setdefault(process.parent, []).append(pid)
        return set(_descendants(root, children))


@dataclass(frozen=True, slots=True)
class CpuTime:
    """In processor seconds between two moments."""

    client: float  # this process
    server: dict[str, float]  # those that it has started, each by its name and number; the busiest first
    others: float  # all else, whether it still runs or has ended: what disturbs the measurement

    @classmethod
    def between(cls, begin: Snapshot, end: Snapshot, root: int) -> "CpuTime":
        """A process of the server that has ended before `end` is among the others."""

        def seconds(pid: int) -> float:
            before = begin.processes.get(pid)
            return end.processes[pid].seconds - (before.seconds if before is not None else 0.0)

        server = {f"{end.processes[pid].name} ({pid})": seconds(pid) for pid in end.below(root)}
        client, busy_s = seconds(root), end.busy_s - begin.busy_s
        # Ticks are counted apart for processes and for cores: a difference may come out below nothing.
        others = max(0.0, busy_s - client - sum(server.values()))
        return cls(client, dict(sorted(server.items(), key=lambda item: -item[1])), others)


def _busy_s(proc: Path) -> float:
    user, nice, system, _idle, _iowait, irq, softirq, steal, *_guests = (
        int(ticks) for ticks in (proc / "stat").read_text().splitlines()[0].split()[1:]
    )
    return (user + nice + system + irq + softirq + steal) / _TICKS_PER_S


def _descendants(root: int, children: dict[int, list[int]]) -> Iterator[int]:
    for child in children.get(root, ()):
        yield child
        yield from _descendants(child, children)


def _read(folder: Path) -> Process | None:
    """None: it has ended meanwhile."""
    try:
        # The name is in parentheses, and may have some of its own.
        short_name, _, rest = (folder / "stat").read_text(errors="replace").partition("(")[2].rpartition(")")
        command = (folder / "cmdline").read_bytes().split(b"\0")
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = rest.split()
    seconds = (int(fields[11]) + int(fields[12])) / _TICKS_PER_S
    title = command[0].decode(errors="replace")
    # A process that has given itself a title has it where its arguments were.
    name = title.split()[0] if "::" in title else short_name
    return Process(int(fields[1]), name, seconds)
