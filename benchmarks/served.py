"""A running `tandem serve`, for benchmarks that measure the whole."""

import asyncio
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

START_S = 180.0


@asynccontextmanager
async def served(*flags: str) -> AsyncIterator[str]:
    """A running `tandem serve`; its base URL."""
    process = await asyncio.create_subprocess_exec(
        Path(sys.executable).with_name("tandem"), "serve", "--port", "0", "--max-model-len", "2048", *flags,
        stdout=asyncio.subprocess.PIPE, env={**os.environ, "COLUMNS": "200"},
    )  # fmt: skip
    assert process.stdout is not None
    try:
        async with asyncio.timeout(START_S):
            while not (found := re.search(rb"(http://\S+)/v1/chat", await process.stdout.readline())):
                assert process.returncode is None, "tandem serve did not start"
        yield found[1].decode()
    finally:
        process.send_signal(signal.SIGINT)
        await process.wait()
