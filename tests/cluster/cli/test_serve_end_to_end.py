"""`tandem serve` as a person runs it: a process of its own, the embedded model, Ctrl-C."""

import json
import os
import re
import select
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

pytestmark = pytest.mark.slow

# Never reached unless something is broken.
PATIENCE_S = 200.0
COMMAND = [sys.executable, "-c", "from cluster.cli import main; main()"]


def processes_of_session(session: int) -> list[int]:
    """Whoever descends from a command that was started in a session of its own, and still runs."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            # pid (name) state parent group session …; the name may hold anything.
            state, _, _, its_session = stat.read_text().rpartition(")")[2].split()[:4]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(its_session) == session and state != "Z":
            found.append(int(stat.parent.name))
    return found


def ends_in_time(pid: int) -> bool:
    try:
        watch = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([watch], [], [], PATIENCE_S)[0])
    finally:
        os.close(watch)


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    # From another directory: nothing may depend on where it is started.
    root = Path(__file__).parents[3]
    environment = os.environ | {"PYTHONPATH": f"{root}:{root / 'proto'}", "RAY_AUTH_MODE": "disabled"}
    arguments = ["--port", "0", "--max-model-len", "512", "--num-blocks", "65", "--threads", "1"]
    with (tmp_path / "stderr").open("w") as stderr:
        process = subprocess.Popen(
            [*COMMAND, "serve", *arguments],
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            start_new_session=True,
        )
    yield process
    # A test that failed halfway leaves all of it behind.
    for pid in processes_of_session(process.pid):
        os.kill(pid, signal.SIGKILL)
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


# As a terminal, and as systemd, `timeout` or a shell do: to everybody, Ray's daemons among them.
@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM])
def test_printed_request_is_answered_apart_and_the_end_leaves_nothing(
    serving: subprocess.Popen[str], tmp_path: Path, end: signal.Signals
) -> None:
    assert serving.stdout is not None
    shared_memory = set(os.listdir("/dev/shm"))
    printed = next((line for line in serving.stdout if line.startswith("curl ")), None)
    assert printed is not None, (tmp_path / "stderr").read_text()

    words = shlex.split(printed)
    reply = httpx.post(words[1], content=words[words.index("-d") + 1], headers={"content-type": "application/json"})
    assert reply.status_code == 200, reply.text
    assert "Paris" in reply.json()["choices"][0]["message"]["content"]
    assert reply.headers["x-tandem-prefill-worker"] == "prefill-0"
    assert reply.headers["x-tandem-decode-worker"] == "decode-0"

    base_url = words[1].removesuffix("/v1/chat/completions")
    status = subprocess.run(
        [*COMMAND, "status", "--json", "--base-url", base_url], capture_output=True, text=True, check=True
    )
    workers = json.loads(status.stdout)["workers"]
    assert [(worker["worker_id"], worker["active_blocks"]) for worker in workers] == [("decode-0", 0), ("prefill-0", 0)]
    assert all(worker["free_blocks"] + worker["cached_blocks"] == 64 for worker in workers)

    os.killpg(serving.pid, end)
    assert serving.wait(PATIENCE_S) == 0, (tmp_path / "stderr").read_text()
    assert all(ends_in_time(pid) for pid in processes_of_session(serving.pid))
    assert processes_of_session(serving.pid) == []
    assert set(os.listdir("/dev/shm")) <= shared_memory
    stderr = (tmp_path / "stderr").read_text()
    assert re.fullmatch(r"(Starting .*\n)?Ending: .*\n", stderr), stderr
