"""Processor time by whose it is, from a made-up /proc and from the real one."""

import os
from pathlib import Path

from benchmarks.cpu_time import CpuTime, Process, Snapshot

TICKS = os.sysconf("SC_CLK_TCK")


def put(
    proc: Path, pid: int, name: str, parent: int, user: int, kernel: int, command: bytes = b"python\0-m\0x\0"
) -> None:
    folder = proc / str(pid)
    folder.mkdir(parents=True)
    between = " ".join("0" * 9)
    (folder / "stat").write_text(f"{pid} ({name}) S {parent} {between} {user} {kernel} 0 0")
    (folder / "cmdline").write_bytes(command)


def test_a_process_is_read_whatever_it_calls_itself(tmp_path: Path) -> None:
    put(tmp_path, 7, "a (strange) name", 1, 2 * TICKS, TICKS)
    put(tmp_path, 8, "ray::IDLE", 7, 0, TICKS, b"ray::Worker.run --with=this\0")
    (tmp_path / "9").mkdir()  # has just ended
    (tmp_path / "stat").write_text(f"cpu  {TICKS} {TICKS} {TICKS} 999 999 {TICKS} {TICKS} {TICKS} 0 0\ncpu0 1 1\n")
    snapshot = Snapshot.take(tmp_path)
    assert snapshot.busy_s == 6.0  # neither idle nor waiting for a disk
    assert snapshot.processes == {
        7: Process(1, "a (strange) name", 3.0),
        8: Process(7, "ray::Worker.run", 1.0),
    }


def test_time_is_the_clients_the_servers_or_others() -> None:
    begin = Snapshot({1: Process(0, "init", 5.0), 2: Process(1, "bench", 1.0), 3: Process(2, "serve", 1.0)}, 100.0)
    begin.processes[4] = Process(3, "worker", 2.0)
    begin.processes[5] = Process(3, "worker", 3.0)
    end = Snapshot({pid: Process(p.parent, p.name, p.seconds + pid) for pid, p in begin.processes.items()}, 130.0)
    end.processes[6] = Process(3, "began since", 6.0)
    time = CpuTime.between(begin, end, root=2)
    assert list(time.server) == ["began since (6)", "worker (5)", "worker (4)", "serve (3)"]
    assert time.client == 2.0
    assert sum(time.server.values()) == 3.0 + 4.0 + 5.0 + 6.0
    # Of 30 s in all; whoever took them may have come and gone in between.
    assert time.others == 30.0 - 20.0


def test_this_process_is_found_with_the_time_that_it_takes() -> None:
    begin, parent, own = Snapshot.take(), os.getppid(), os.getpid()
    while (end := Snapshot.take()).processes[own].seconds - begin.processes[own].seconds < 0.03:
        pass
    assert CpuTime.between(begin, end, own).client >= 0.03
    assert own in end.below(parent)
