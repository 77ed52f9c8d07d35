"""Choices of one prompt from end to end of the gateway's lower half, over real workers: computed once, always right."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace

import pytest

from cluster.generator import SequenceChunk, SequenceRequest
from cluster.router import RouterConfig
from engine.executor import SampledToken
from engine.hash_executor import expected_prompt_logprobs
from engine.sampling_params import SamplingParams
from fake_cluster import request, token_ids
from real_cluster import APART, VOCAB_SIZE, RealCluster, expected, prompt_of, real_cluster

LOCAL = RouterConfig(max_local_prefill_tokens=512)


def choices_of(prompt: tuple[int, ...], num_choices: int, params: SamplingParams) -> list[SequenceRequest]:
    first = request(prompt, params=params)
    return [
        replace(first, request_id=f"{first.request_id}-{i}", params=replace(params, seed=31 * i - 5))
        for i in range(num_choices)
    ]


class Answer:
    """What one choice's reader has received."""

    def __init__(self, chunks: AsyncGenerator[SequenceChunk, None], num_tokens: int | None) -> None:
        self.chunks: list[SequenceChunk] = []
        self.started = asyncio.Event()
        self._num_tokens = num_tokens  # after so many it leaves
        self.task = asyncio.create_task(self._read(chunks))

    async def _read(self, stream: AsyncGenerator[SequenceChunk, None]) -> None:
        async with aclosing(stream) as chunks:
            async for chunk in chunks:
                self.chunks.append(chunk)
                self.started.set()
                if self._num_tokens is not None and len(self.tokens) >= self._num_tokens:
                    return

    @property
    def tokens(self) -> list[int]:
        return token_ids(self.chunks)

    @property
    def prompt_logprobs(self) -> tuple[SampledToken, ...] | None:
        first, *others = self.chunks
        assert all(chunk.prompt_logprobs is None for chunk in others)
        return first.prompt_logprobs


def ask(c: RealCluster, choices: Sequence[SequenceRequest], leave_after: dict[int, int] | None = None) -> list[Answer]:
    """Reads all choices side by side; some leave after so many tokens."""
    streams = c.generator.generate_choices(choices)
    return [Answer(stream, (leave_after or {}).get(i)) for i, stream in enumerate(streams)]


async def over(answers: Sequence[Answer]) -> None:
    await asyncio.gather(*(answer.task for answer in answers))


def computed(c: RealCluster) -> dict[str, int]:
    return {name: worker._stats.num_computed_tokens for name, worker in c.workers.items()}


async def all_given_back(c: RealCluster) -> None:
    for worker in c.membership.workers():
        assert worker.info is not None
        while (load := c.membership.ledger.load(worker.info.instance_id)) and load.num_active_blocks:
            await asyncio.sleep(0)


@pytest.mark.parametrize("router", [APART, LOCAL], ids=["apart", "local"])
@pytest.mark.parametrize("num_choices", range(1, 9))
@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_choices_have_their_tokens_cold_and_warm_and_the_prompt_is_computed_once(
    router: RouterConfig, num_choices: int, temperature: float
) -> None:
    async with real_cluster("p0 d0", router) as c:
        params = SamplingParams(max_tokens=9, temperature=temperature)
        for length in (40, 96):
            prompt = prompt_of(length, seed=length)
            for turn in range(2):
                cached = (length - 1) // 16 * 16 if turn else 0
                before = computed(c)
                choices = choices_of(prompt, num_choices, params)
                answers = ask(c, choices)
                await over(answers)
                assert [answer.tokens for answer in answers] == [expected(choice) for choice in choices]
                assert all(answer.chunks[0].num_cached_tokens == cached for answer in answers)
                await all_given_back(c)
                added = {name: count - before[name] for name, count in computed(c).items()}
                prompt_at, decoded = ("p0" if router is APART else "d0"), num_choices * 8
                assert added[prompt_at] == length - cached + decoded * (prompt_at == "d0")
                assert sum(added.values()) == length - cached + decoded
                await c.directory_agrees()


@pytest.mark.parametrize("router", [APART, LOCAL], ids=["apart", "local"])
@pytest.mark.parametrize("num_choices", [1, 3])
async def test_log_probabilities_of_the_prompt_are_right_cold_and_warm(router: RouterConfig, num_choices: int) -> None:
    async with real_cluster("p0 d0", router) as c:
        prompt, params = prompt_of(130), SamplingParams(max_tokens=5, prompt_logprobs=4)
        for _ in range(3):
            choices = choices_of(prompt, num_choices, params)
            answers = ask(c, choices)
            await over(answers)
            wanted = expected_prompt_logprobs(prompt, params, VOCAB_SIZE)
            for answer, choice in zip(answers, choices, strict=True):
                assert answer.tokens == expected(choice)
                assert answer.prompt_logprobs == wanted
                assert answer.chunks[0].num_cached_tokens == 0
            await c.directory_agrees()
        assert c.generator.stats.planned_cached_tokens == c.generator.stats.stale_hits == 0
        # What they were computed for is cached for others.
        (after,) = ask(c, choices_of(prompt, 1, SamplingParams(max_tokens=1)))
        await over([after])
        assert after.chunks[0].num_cached_tokens == 128


@pytest.mark.parametrize("victim", ["p0", "d0"])
async def test_a_worker_that_goes_in_the_middle_changes_no_choice(victim: str) -> None:
    async with real_cluster("p0 p1 d0 d1", APART) as c:
        params = SamplingParams(max_tokens=150, prompt_logprobs=1)
        prompts = [choices_of(prompt_of(60 + 40 * i, seed=i), 4, params) for i in range(6)]
        asked = [ask(c, choices) for choices in prompts]
        await asked[0][0].started.wait()  # some decode, others are still being prefilled
        await c.workers[victim].stop()
        for choices, answers in zip(prompts, asked, strict=True):
            await over(answers)
            assert [answer.tokens for answer in answers] == [expected(choice) for choice in choices]
            wanted = expected_prompt_logprobs(choices[0].prompt_token_ids, params, VOCAB_SIZE)
            assert all(answer.prompt_logprobs == wanted for answer in answers)


@pytest.mark.parametrize("router", [APART, LOCAL], ids=["apart", "local"])
async def test_choices_that_leave_at_any_time_take_nothing_with_them(router: RouterConfig) -> None:
    async with real_cluster("p0 d0 d1", router) as c:
        prompts = [choices_of(prompt_of(30 + 25 * i, seed=i), 4, SamplingParams(max_tokens=80)) for i in range(12)]
        asked = [
            ask(c, choices, {0: 1 + i, 2: 3 * i} if i % 3 else {k: 1 + k for k in range(4)})
            for i, choices in enumerate(prompts)
        ]
        await asyncio.sleep(0)
        for i, answers in enumerate(asked):
            if i % 4 == 1:
                answers[i % 3].task.cancel()  # before its first token
        await asyncio.gather(*(answer.task for answers in asked for answer in answers), return_exceptions=True)
        for choices, answers in zip(prompts, asked, strict=True):
            for choice, answer in zip(choices, answers, strict=True):
                whole = expected(choice)
                assert answer.tokens == whole[: len(answer.tokens)]
                if not answer.task.cancelled() and answer._num_tokens is None:
                    assert answer.tokens == whole
        await all_given_back(c)
        assert c.generator.stats.num_active == 0


async def test_choices_of_many_prompts_share_a_pool_too_small_for_them() -> None:
    async with real_cluster("", APART) as c:
        await c.start("p0", num_blocks=40)
        await c.start("d0", num_blocks=40)
        prompts = [
            choices_of(prompt_of(100 + 13 * i, seed=i), 1 + i % 6, SamplingParams(max_tokens=60)) for i in range(10)
        ]
        asked = [ask(c, choices) for choices in prompts]
        for choices, answers in zip(prompts, asked, strict=True):
            await over(answers)
            assert [answer.tokens for answer in answers] == [expected(choice) for choice in choices]
