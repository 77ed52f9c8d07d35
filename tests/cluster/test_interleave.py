"""Several streams as one."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from cluster.interleave import interleave


class Source:
    """A stream of numbers, which remembers that it was closed."""

    def __init__(self, items: list[int], error: Exception | None = None, *, waits: bool = False) -> None:
        self.items = items
        self.error = error
        self.waits = waits
        self.num_taken = 0
        self.is_closed = False

    async def __call__(self) -> AsyncGenerator[int, None]:
        try:
            for item in self.items:
                await asyncio.sleep(0)
                self.num_taken += 1
                yield item
            if self.waits:
                await asyncio.Event().wait()
            if self.error is not None:
                raise self.error
        finally:
            self.is_closed = True


@pytest.mark.parametrize("number", [1, 2, 5])
async def test_all_items_come_each_stream_in_its_order(number: int) -> None:
    sources = [Source(list(range(10 * i, 10 * i + 5))) for i in range(number)]
    items = [item async for item in interleave([source() for source in sources])]
    for i in range(number):
        assert [item for item in items if item // 10 == i] == sources[i].items
    assert all(source.is_closed for source in sources)


@pytest.mark.parametrize("number", [1, 3])
async def test_first_error_ends_all_streams(number: int) -> None:
    sources = [Source([1], ValueError("broken")), *(Source([2], waits=True) for _ in range(number - 1))]
    with pytest.raises(ValueError, match="broken"):
        _ = [item async for item in interleave([source() for source in sources])]
    assert all(source.is_closed for source in sources)


@pytest.mark.parametrize("number", [1, 3])
async def test_leaving_early_closes_all_streams(number: int) -> None:
    sources = [Source([1, 2, 3], waits=True) for _ in range(number)]
    async with aclosing(interleave([source() for source in sources])) as items:
        await anext(items)
    assert all(source.is_closed for source in sources if source.num_taken)


@pytest.mark.parametrize("number", [1, 3])
async def test_cancelling_the_reader_closes_all_streams(number: int) -> None:
    sources = [Source([1], waits=True) for _ in range(number)]
    received = asyncio.Event()

    async def read() -> None:
        async with aclosing(interleave([source() for source in sources])) as items:
            async for _ in items:
                received.set()

    task = asyncio.create_task(read())
    await received.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert all(source.is_closed for source in sources if source.num_taken)


async def test_reader_that_stops_reading_stalls_the_streams() -> None:
    sources = [Source(list(range(100))) for _ in range(2)]
    async with aclosing(interleave([source() for source in sources])) as items:
        await anext(items)
        for _ in range(500):
            await asyncio.sleep(0)
        assert sum(source.num_taken for source in sources) <= 5
