"""Which host a process says it is on."""

import subprocess
import sys
from pathlib import Path

from worker.host import host_id


def test_processes_of_one_host_agree() -> None:
    code = "from worker.host import host_id; print(host_id())"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert other.stdout.strip() == host_id() != ""


def machine(folder: Path, boot_id: str) -> Path:
    proc = folder / boot_id
    (proc / "sys/kernel/random").mkdir(parents=True)
    (proc / "sys/kernel/random/boot_id").write_text(f"{boot_id}\n")
    (proc / "self/ns").mkdir(parents=True)
    (proc / "self/ns/pid").touch()
    return proc


def test_another_machine_and_another_pid_namespace_are_other_hosts(tmp_path: Path) -> None:
    one, other = machine(tmp_path, "one"), machine(tmp_path, "other")
    (other / "self/ns/pid").unlink()
    (other / "self/ns/pid").hardlink_to(one / "self/ns/pid")
    ids = {host_id(one), host_id(other)}
    (other / "sys/kernel/random/boot_id").write_text("one\n")
    assert host_id(other) == host_id(one)  # nothing else counts
    (other / "self/ns/pid").unlink()
    (other / "self/ns/pid").touch()
    assert len({*ids, host_id(other)}) == 3


def test_host_that_cannot_be_known_has_no_id(tmp_path: Path) -> None:
    assert host_id(tmp_path) == ""
