"""Which host a process says it is on."""

import subprocess
import sys
from pathlib import Path

from worker.host import host_id


def test_processes_of_one_host_agree() -> None:
    code = "from worker.host import host_id; print(host_id())"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert other.stdout.strip() == host_id() != ""


def proc_of(folder: Path, boot_id: str, pid_namespace: str) -> Path:
    proc = folder / f"{boot_id}-{pid_namespace}"
    (proc / "sys/kernel/random").mkdir(parents=True)
    (proc / "sys/kernel/random/boot_id").write_text(f"{boot_id}\n")
    (proc / "self/ns").mkdir(parents=True)
    (proc / "self/ns/pid").symlink_to(f"pid:[{pid_namespace}]")
    return proc


def test_another_machine_and_another_pid_namespace_are_other_hosts(tmp_path: Path) -> None:
    hosts = [("one", "1"), ("one", "2"), ("other", "1")]
    ids = [host_id(proc_of(tmp_path, *host)) for host in hosts]
    assert len(set(ids)) == 3
    assert host_id(proc_of(tmp_path / "again", *hosts[0])) == ids[0]


def test_host_that_cannot_be_known_has_no_id(tmp_path: Path) -> None:
    assert host_id(tmp_path) == ""
