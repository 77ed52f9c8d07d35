"""Choices of one prompt over fake workers: their requests, and clients who read them side by side."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace

from cluster.generator import SequenceChunk, SequenceRequest
from cluster.router import RouterConfig
from engine.sampling_params import SamplingParams
from fake_cluster import FakeCluster, request, token_ids
from fake_worker import FakeRequest, continuation

APART = RouterConfig(max_local_prefill_tokens=0)
PROMPT = (1, 2, 3)


def choices_of(
    num_choices: int, prompt: tuple[int, ...] = PROMPT, *, max_tokens: int = 6, **changes: object
) -> list[SequenceRequest]:
    params = SamplingParams(max_tokens=max_tokens, prompt_logprobs=changes.pop("prompt_logprobs", None))  # type: ignore[arg-type]
    first = request(prompt, **changes)
    return [
        replace(first, request_id=f"{first.request_id}-{seed}", params=replace(params, seed=seed))
        for seed in range(1, num_choices + 1)
    ]


def expected(sequences: Sequence[SequenceRequest]) -> list[list[int]]:
    return [continuation(s.prompt_token_ids, s.params.max_tokens, s.params.seed) for s in sequences]


class Readings:
    """A client of each choice, which read side by side."""

    def __init__(self, c: FakeCluster, sequences: Sequence[SequenceRequest]) -> None:
        self.chunks: list[list[SequenceChunk]] = [[] for _ in sequences]
        self._arrived = asyncio.Event()
        streams = c.generator.generate_choices(sequences)
        self.tasks = [asyncio.create_task(self._read(i, stream)) for i, stream in enumerate(streams)]

    async def _read(self, index: int, stream: AsyncGenerator[SequenceChunk, None]) -> list[int]:
        async with aclosing(stream) as chunks:
            async for chunk in chunks:
                self.chunks[index].append(chunk)
                self._arrived.set()
        return token_ids(self.chunks[index])

    async def have(self, num_tokens: int) -> None:
        while any(len(token_ids(chunks)) < num_tokens for chunks in self.chunks):
            self._arrived.clear()
            await self._arrived.wait()

    async def leave(self, index: int) -> None:
        self.tasks[index].cancel()
        await asyncio.gather(self.tasks[index], return_exceptions=True)

    async def tokens(self) -> list[list[int]]:
        return list(await asyncio.gather(*self.tasks))

    async def errors(self) -> list[BaseException | list[int]]:
        return list(await asyncio.gather(*self.tasks, return_exceptions=True))


async def arrived(c: FakeCluster, num_choices: int) -> list[FakeRequest]:
    return [await c.next_request() for _ in range(num_choices)]
