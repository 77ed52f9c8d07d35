"""Which host this is, to those that map each other's memory."""

import os
from pathlib import Path

PROC = Path("/proc")


def host_id(proc: Path = PROC) -> str:
    """Equal for processes whose pools can be mapped by each other; empty where it cannot be known.

    A pool is opened through its owner's process id, on a CPU (`/proc/<pid>/fd`) and on a GPU (CUDA IPC). So it takes
    the same machine, told by the id of its start, and the same PID namespace: containers that have each their own are
    hosts of their own.

    Args:
        proc: where procfs is mounted.
    """
    try:
        boot_id = (proc / "sys/kernel/random/boot_id").read_text().strip()
        pid_namespace = os.readlink(proc / "self/ns/pid")
    except OSError:
        return ""
    return f"{boot_id} {pid_namespace}"
