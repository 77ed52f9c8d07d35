"""The gateway's lower half over real workers, real but for the model: the tokens tell whether every block was right."""

import asyncio
from contextlib import aclosing

import pytest

from cluster.errors import InvalidRequest, NoWorker
from cluster.router import RouterConfig
from cluster.worker_info import Role
from engine.sampling_params import SamplingParams
from fake_cluster import request, token_ids
from real_cluster import APART, DEFAULT, expected, prompt_of, real_cluster


@pytest.mark.parametrize("router", [APART, DEFAULT], ids=["apart", "default"])
@pytest.mark.parametrize("names", ["d0", "p0 d0", "p0 p1 d0 d1"])
async def test_many_at_once_get_their_tokens_and_the_directory_knows_what_is_cached(
    names: str, router: RouterConfig
) -> None:
    async with real_cluster(names, router) as c:
        shared = prompt_of(70, seed=99)
        sequences = [
            request(
                (shared[: 16 * (i % 5)] + prompt_of(1 + 17 * i % 130, seed=i)),
                params=SamplingParams(max_tokens=1 + i % 23, temperature=i % 2, seed=i),
                cache_salt="tenant" if i % 7 == 0 else "",
            )
            for i in range(40)
        ]
        for turn in range(2):
            again = [request(s.prompt_token_ids, params=s.params, cache_salt=s.cache_salt) for s in sequences]
            answers = await asyncio.gather(*(c.tokens(s) for s in again))
            assert answers == [expected(s) for s in again], f"turn {turn}"
        await c.directory_agrees()
        assert c.generator.stats.planned_cached_tokens > 0


async def test_a_second_turn_is_not_computed_again_by_whoever_prefills_it() -> None:
    async with real_cluster("p0 p1 d0 d1", APART) as c:
        first = request(prompt_of(100), max_tokens=60)
        answer = await c.tokens(first)
        await c.directory_agrees()
        whole = (*first.prompt_token_ids, *answer)
        second = request((*whole, *prompt_of(30, seed=2)), max_tokens=5)
        chunks = [chunk async for chunk in c.generator.generate(second)]
        assert token_ids(chunks) == expected(second)
        assert chunks[0].num_cached_tokens >= (len(whole) - 1) // 16 * 16
        assert c.generator.stats.stale_hits == 0


async def test_a_decode_worker_that_goes_in_the_middle_is_not_noticed() -> None:
    async with real_cluster("p0 d0 d1") as c:
        sequences = [request(prompt_of(20 + 30 * i, seed=i), max_tokens=300) for i in range(6)]
        received: list[list[int]] = [[] for _ in sequences]
        halfway = asyncio.Event()

        async def read(index: int) -> None:
            async with aclosing(c.generator.generate(sequences[index])) as chunks:
                async for chunk in chunks:
                    received[index].extend(token.token_id for token in chunk.tokens)
                    if all(received):
                        halfway.set()

        reading = [asyncio.create_task(read(i)) for i in range(len(sequences))]
        await halfway.wait()
        await c.workers["d0"].stop()
        await asyncio.gather(*reading)
        assert received == [expected(s) for s in sequences]
        assert c.generator.stats.resubmissions > 0


async def test_a_prefill_worker_that_goes_is_replaced_by_another_then_by_the_decode_worker_itself() -> None:
    async with real_cluster("p0 p1 d0", APART) as c:
        sequences = [request(prompt_of(400, seed=i), max_tokens=10) for i in range(12)]
        tasks = [asyncio.create_task(c.tokens(s)) for s in sequences]
        await tasks[0]
        await c.workers["p0"].stop()
        await tasks[1]
        await c.workers["p1"].stop()
        assert await asyncio.gather(*tasks) == [expected(s) for s in sequences]
        while c.membership.num_ready(Role.PREFILL):
            await c.membership._changed.wait()
        later = request(prompt_of(100, seed=50))
        assert await c.tokens(later) == expected(later)
        assert c.generator.stats.local_fallbacks > 0


async def test_a_worker_that_restarts_at_its_address_serves_again_with_nothing_of_its_old_cache() -> None:
    async with real_cluster("p0 d0", APART) as c:
        first = request(prompt_of(100))
        assert await c.tokens(first) == expected(first)
        for name in ("p0", "d0"):
            port = c.port(name)
            old = c.workers[name]
            await old.stop()
            while c.membership.session(old.instance_id):
                await c.membership._changed.wait()
            new = await c.start(name, port=port)
            assert c.membership.directory.num_blocks(old.instance_id) == 0
            assert new.instance_id != old.instance_id
            again = request(first.prompt_token_ids, params=first.params)
            assert await c.tokens(again) == expected(again)
        await c.directory_agrees()


async def test_when_half_of_the_clients_leave_nothing_is_held_for_them() -> None:
    async with real_cluster("p0 d0 d1", APART) as c:
        sequences = [request(prompt_of(50 + 10 * i, seed=i), max_tokens=200) for i in range(16)]
        tasks = [asyncio.create_task(c.tokens(s)) for s in sequences]
        await asyncio.sleep(0)
        for i in range(0, 16, 4):
            tasks[i].cancel()
        await tasks[1]
        for i in range(2, 16, 4):
            tasks[i].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for i in range(1, 16, 2):
            assert tasks[i].result() == expected(sequences[i])
        for worker in c.membership.workers():
            assert worker.info is not None
            while (load := c.membership.ledger.load(worker.info.instance_id)) and load.num_active_blocks:
                await asyncio.sleep(0)


async def test_the_longest_request_that_the_workers_allow_is_served_and_a_longer_one_refused() -> None:
    async with real_cluster("d0") as c:
        with pytest.raises(InvalidRequest, match="maximum context length is 512 tokens"):
            await c.tokens(request(prompt_of(500), max_tokens=13))
        exact = request(prompt_of(500), max_tokens=12)
        assert await c.tokens(exact) == expected(exact)


async def test_without_any_decode_worker_left_it_fails_at_once() -> None:
    async with real_cluster("p0 d0") as c:
        await c.workers["d0"].stop()
        while c.membership.num_ready(Role.DECODE):
            await c.membership._changed.wait()
        with pytest.raises(NoWorker, match="1 prefill workers are"):
            await c.tokens(request())
