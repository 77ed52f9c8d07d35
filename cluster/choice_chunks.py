"""A choice's chunks, as its reader holds them: closing them counts even before the first was read.

An async generator that was never begun runs nothing when it is closed. A choice must: it is at a worker as soon as
another choice of its prompt is read.
"""

from collections.abc import AsyncGenerator, Awaitable, Callable
from types import TracebackType
from typing import Any

from cluster.generator import SequenceChunk


class ChoiceChunks(AsyncGenerator[SequenceChunk, None]):
    """`chunks`, and a word when they are closed.

    Args:
        closed: called when they have been closed; perhaps several times.
    """

    def __init__(self, chunks: AsyncGenerator[SequenceChunk, None], closed: Callable[[], None]) -> None:
        self._chunks = chunks
        self._closed = closed

    def __anext__(self) -> Awaitable[SequenceChunk]:  # type: ignore[override]  # spares a coroutine for each chunk
        return self._chunks.__anext__()

    async def asend(self, value: None) -> SequenceChunk:
        return await self._chunks.asend(value)

    async def athrow(
        self,
        kind: type[BaseException] | BaseException,
        value: BaseException | object = None,
        traceback: TracebackType | None = None,
    ) -> Any:
        return await self._chunks.athrow(kind, value, traceback)  # type: ignore[arg-type]

    async def aclose(self) -> None:
        try:
            await self._chunks.aclose()
        finally:
            self._closed()
