"""Several streams as one, in the order their items come."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

T = TypeVar("T")


class _End:
    """A stream's last word: how it ended."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


async def interleave(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
    """Yields the items of all `streams`. The first that fails ends the whole; ending early closes every stream.

    A consumer that does not read stalls the streams: at most one item of each waits here.
    """
    if len(streams) == 1:
        async with aclosing(streams[0]) as stream:
            async for item in stream:
                yield item
        return
    queue: asyncio.Queue[T | _End] = asyncio.Queue(maxsize=1)

    async def forward(stream: AsyncGenerator[T, None]) -> None:
        try:
            async with aclosing(stream):
                async for item in stream:
                    await queue.put(item)
        except Exception as exc:  # raised again by the reader
            await queue.put(_End(exc))
        else:
            await queue.put(_End(None))

    tasks = [asyncio.create_task(forward(stream)) for stream in streams]
    try:
        running = len(tasks)
        while running:
            received = await queue.get()
            if not isinstance(received, _End):
                yield received
            elif received.error is not None:
                raise received.error
            else:
                running -= 1
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        # A task cancelled before its first step has never entered its stream.
        for stream in streams:
            await stream.aclose()
