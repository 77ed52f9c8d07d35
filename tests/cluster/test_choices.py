"""Choices of one prompt, over fake workers: begun together, ended each by itself."""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import replace

import pytest

from assigned import num_assigned
from cluster.errors import Cancelled, DeadlineExceeded, NoWorker, QueueFull, WorkerFailed
from cluster.generator import SequenceChunk
from cluster.worker_link import LinkConfig
from engine.kvcache.block_hash import hash_blocks, root_hash
from fake_cluster import fake_cluster, token_ids
from fake_worker import BLOCK_SIZE, prompt_logprobs
from gateway_choices import APART, PROMPT, Readings, arrived, choices_of, expected

# --- begun together


@pytest.mark.parametrize("num_choices", range(1, 9))
async def test_all_choices_are_one_submit_whose_prompt_counts_once(num_choices: int) -> None:
    async with fake_cluster("p0 d0", router=APART) as c:
        sequences = choices_of(num_choices, tuple(range(10)), cache_salt="tenant", priority=3, timeout_s=30.0)
        readings = Readings(c, sequences)
        at_d0 = await arrived(c, num_choices)
        (submit,) = c.workers["d0"].submits
        assert list(submit.prompt_token_ids) == list(range(10))
        assert (submit.cache_salt, submit.priority, submit.timeout_ms) == ("tenant", 3, 30_000)
        assert submit.plan.prefill_worker.worker_id == "p0"
        if num_choices == 1:
            assert not submit.choices
            assert submit.sampling_params.seed == 1
        else:
            assert [choice.seed for choice in submit.choices] == list(range(1, num_choices + 1))
            assert len({submit.request_id, *(choice.request_id for choice in submit.choices)}) == num_choices + 1
        ledger = c.membership.ledger
        accounts = {account.info.worker_id: account for account in ledger.accounts.values()}
        assert (accounts["p0"].num_requests, accounts["p0"].num_tokens) == (1, 10)
        assert (accounts["d0"].num_requests, accounts["d0"].num_tokens) == (num_choices, 0)
        assert num_assigned(ledger) == c.generator.stats.num_active == num_choices
        ledger.check_integrity()
        at_d0[0].send_first_tokens()
        await readings.have(1)
        assert (accounts["p0"].num_requests, accounts["p0"].num_tokens) == (0, 0)
        for number, at in enumerate(at_d0, 1):
            at.send_all()
            await readings.tasks[number - 1]
            ledger.check_integrity()
            assert accounts["d0"].num_requests == num_choices - number
        assert await readings.tokens() == expected(sequences)
        assert not any(at.aborted.is_set() for at in at_d0)


async def test_what_was_cached_of_their_prompt_is_told_to_each_and_counted_once() -> None:
    async with fake_cluster("d0", automatic=True) as c:
        prompt = tuple(range(20))
        d0 = c.workers["d0"]
        d0.store(*hash_blocks(root_hash(b"fake-model"), prompt, BLOCK_SIZE))
        while c.membership.directory.num_blocks(d0.instance_id) < 5:
            await asyncio.sleep(0)
        d0.num_cached_tokens = 8
        readings = Readings(c, choices_of(3, prompt))
        await readings.tokens()
        assert [chunks[0].num_cached_tokens for chunks in readings.chunks] == [8, 8, 8]
        assert c.generator.stats.planned_cached_tokens == 16
        assert c.generator.stats.stale_hits == 1


async def test_a_fallback_to_local_prefill_is_counted_once() -> None:
    async with fake_cluster("d0", automatic=True, router=APART) as c:
        await Readings(c, choices_of(4)).tokens()
        assert c.generator.stats.local_fallbacks == 1


async def test_sequences_that_are_no_choices_of_one_prompt_are_no_good() -> None:
    async with fake_cluster("d0") as c:
        first, second = choices_of(2)
        for other in (
            replace(second, prompt_token_ids=(1, 2)),
            replace(second, cache_salt="other"),
            replace(second, params=replace(second.params, max_tokens=7)),
            replace(second, request_id=first.request_id),
        ):
            with pytest.raises(ValueError, match="choices"):
                c.generator.generate_choices([first, other])


async def test_choices_take_the_places_that_were_kept_for_them_or_all_of_their_own_or_none() -> None:
    async with fake_cluster("d0", automatic=True, max_concurrent=4) as c:
        kept = choices_of(3)
        with c.generator.admit(kept):
            for error in await Readings(c, choices_of(2)).errors():
                assert isinstance(error, QueueFull), error
            assert c.generator.stats.queue_full == 2
            assert await Readings(c, kept).tokens() == expected(kept)
        own = choices_of(4)
        assert await Readings(c, own).tokens() == expected(own)
        assert len(c.workers["d0"].submits) == 2


@pytest.mark.parametrize("names", ["", "p0"])
async def test_without_a_decode_worker_every_choice_hears_why(names: str) -> None:
    async with fake_cluster(names) as c:
        errors = await Readings(c, choices_of(3)).errors()
        assert all(isinstance(error, NoWorker) for error in errors), errors


# --- log-probabilities of the prompt


@pytest.mark.parametrize("num_choices", [1, 3])
async def test_the_first_chunk_of_each_choice_has_the_prompts_log_probabilities(num_choices: int) -> None:
    async with fake_cluster("p0 d0", automatic=True, router=APART) as c:
        readings = Readings(c, choices_of(num_choices, tuple(range(9)), prompt_logprobs=2))
        await readings.tokens()
        (submit,) = c.workers["d0"].submits
        assert submit.sampling_params.prompt_logprobs == 2
        for chunks in readings.chunks:
            assert chunks[0].prompt_logprobs == prompt_logprobs(range(9), 2)
            assert all(chunk.prompt_logprobs is None for chunk in chunks[1:])


async def test_nobodys_cache_is_counted_on_where_they_are_wanted() -> None:
    async with fake_cluster("d0 d1", automatic=True) as c:
        prompt = tuple(range(20))
        d1 = c.workers["d1"]
        d1.store(*hash_blocks(root_hash(b"fake-model"), prompt, BLOCK_SIZE))
        while c.membership.directory.num_blocks(d1.instance_id) < 5:
            await asyncio.sleep(0)
        await Readings(c, choices_of(2, prompt, prompt_logprobs=0)).tokens()
        ((submit,),) = (worker.submits for worker in c.workers.values() if worker.submits)
        assert not submit.plan.HasField("cached_on")
        assert submit.plan.num_cached_blocks == c.generator.stats.planned_cached_tokens == 0


async def test_the_choice_that_they_come_with_may_have_left_meanwhile() -> None:
    async with fake_cluster("d0") as c:
        readings = Readings(c, choices_of(3, prompt_logprobs=1))
        at_d0 = await arrived(c, 3)
        at_d0[0].send_first_tokens()  # with the first one's, and that one leaves before it hears of it
        await readings.leave(0)
        for at in at_d0[1:]:
            at.send_all()
        await asyncio.gather(*readings.tasks[1:])
        for chunks in readings.chunks[1:]:
            assert chunks[0].prompt_logprobs == prompt_logprobs(PROMPT, 1)


async def test_a_choice_that_is_moved_asks_for_them_only_if_they_have_not_come() -> None:
    async with fake_cluster("d0 d1 d2") as c:
        sequences = choices_of(2, prompt_logprobs=1)
        readings = Readings(c, sequences)
        first = await arrived(c, 2)
        first[0].send_first_tokens()
        await readings.have(1)
        first[0].session.end()
        for at in await arrived(c, 2):
            assert not at.submit.sampling_params.HasField("prompt_logprobs")
            at.send_all()
        assert await readings.tokens() == expected(sequences)

        readings = Readings(c, sequences)
        first = await arrived(c, 2)
        await first[0].session.worker.kill()
        for at in await arrived(c, 2):
            assert at.submit.sampling_params.prompt_logprobs == 1
            at.send_all()
        assert await readings.tokens() == expected(sequences)
        assert all(chunks[0].prompt_logprobs == prompt_logprobs(PROMPT, 1) for chunks in readings.chunks)


async def test_a_worker_that_does_not_send_them_has_failed() -> None:
    async with fake_cluster("d0") as c:
        readings = Readings(c, choices_of(1, prompt_logprobs=1))
        (at_d0,) = await arrived(c, 1)
        at_d0.submit.sampling_params.ClearField("prompt_logprobs")
        at_d0.send_tokens()
        (error,) = await readings.errors()
        assert isinstance(error, WorkerFailed)
        assert "without the prompt's log-probabilities" in error.message
        await at_d0.aborted.wait()


# --- ends


@pytest.mark.parametrize("num_tokens", [0, 2])
async def test_a_choice_that_is_closed_is_aborted_alone(num_tokens: int) -> None:
    async with fake_cluster("d0") as c:
        sequences = choices_of(3)
        readings = Readings(c, sequences)
        at_d0 = await arrived(c, 3)
        for at in at_d0:
            at.send_tokens(num_tokens)
        await readings.have(num_tokens)
        await readings.leave(1)
        await at_d0[1].aborted.wait()
        assert num_assigned(c.membership.ledger) == c.generator.stats.num_active == 2
        for at in (at_d0[0], at_d0[2]):
            assert not at.aborted.is_set()
            at.send_all()
        assert await readings.tasks[0] == expected(sequences)[0]
        assert await readings.tasks[2] == expected(sequences)[2]
        assert num_assigned(c.membership.ledger) == c.generator.stats.num_active == 0


async def test_a_choice_that_is_closed_before_any_was_read_is_never_submitted() -> None:
    async with fake_cluster("d0", automatic=True) as c:
        sequences = choices_of(3)
        streams = c.generator.generate_choices(sequences)
        await streams[1].aclose()
        chunks = [[chunk async for chunk in streams[i]] for i in (0, 2)]
        assert [token_ids(read) for read in chunks] == [expected(sequences)[i] for i in (0, 2)]
        (submit,) = c.workers["d0"].submits
        assert [choice.seed for choice in submit.choices] == [1, 3]


async def test_a_choice_that_is_closed_before_it_was_read_is_aborted_once_another_was() -> None:
    async with fake_cluster("d0") as c:
        sequences = choices_of(2)
        streams = c.generator.generate_choices(sequences)
        reading = asyncio.ensure_future(anext(streams[0]))
        at_d0 = await arrived(c, 2)
        await streams[1].aclose()
        await streams[1].aclose()
        await at_d0[1].aborted.wait()
        assert num_assigned(c.membership.ledger) == c.generator.stats.num_active == 1
        at_d0[0].send_tokens()
        assert token_ids([await reading]) == expected(sequences)[0][:1]
        await streams[0].aclose()
        await at_d0[0].aborted.wait()
        assert c.generator.stats.num_active == 0


async def test_a_deadline_ends_all_choices_here_and_at_the_worker() -> None:
    async with fake_cluster("d0") as c:
        num_timers = c.clock.num_timers
        readings = Readings(c, choices_of(3, timeout_s=5.0))
        at_d0 = await arrived(c, 3)
        at_d0[0].send_first_tokens()
        await readings.have(1)
        c.clock.advance(5.0)
        assert all(isinstance(error, DeadlineExceeded) for error in await readings.errors())
        for at in at_d0:
            await at.aborted.wait()
        assert c.clock.num_timers == num_timers
        assert num_assigned(c.membership.ledger) == 0


async def test_a_choice_that_is_not_read_is_aborted_and_the_others_go_on() -> None:
    async with fake_cluster("d0", link=LinkConfig(max_buffered=4)) as c:
        sequences = choices_of(2, max_tokens=12)
        slow, fast = c.generator.generate_choices(sequences)
        reading = asyncio.ensure_future(collect(fast))
        at_d0 = await arrived(c, 2)
        for _ in range(12):
            for at in at_d0:
                if not at.aborted.is_set():
                    at.send_tokens()
            await asyncio.sleep(0)
        assert await reading == expected(sequences)[1]
        await at_d0[0].aborted.wait()
        received: list[int] = []
        with pytest.raises(Cancelled, match="4 steps behind"):
            await collect(slow, received)
        assert received == expected(sequences)[0][:4]


async def collect(stream: AsyncGenerator[SequenceChunk, None], into: list[int] | None = None) -> list[int]:
    into = [] if into is None else into
    async for chunk in stream:
        into += token_ids([chunk])
    return into
