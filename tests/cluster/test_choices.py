"""Choices of one prompt, over fake workers: begun together, repaired together, moved and ended each by itself."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace

import grpc
import pytest

from assigned import num_assigned
from cluster.errors import (
    Cancelled,
    DeadlineExceeded,
    GenerationError,
    InvalidRequest,
    NoWorker,
    QueueFull,
    WorkerFailed,
)
from cluster.generator import SequenceChunk, SequenceRequest
from cluster.request_run import RunLimits
from cluster.router import RouterConfig
from cluster.worker_link import LinkConfig
from engine.kvcache.block_hash import hash_blocks, root_hash
from engine.sampling_params import SamplingParams
from fake_cluster import FakeCluster, fake_cluster, request, token_ids
from fake_worker import BLOCK_SIZE, FakeRequest, continuation, prompt_logprobs

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


# --- a worker is lost


async def test_one_choice_is_asked_for_another_prefill_worker_and_it_is_for_all() -> None:
    async with fake_cluster("p0 p1 d0", router=APART) as c:
        sequences = choices_of(3)
        readings = Readings(c, sequences)
        at_d0 = await arrived(c, 3)
        lost = at_d0[0].submit.plan.prefill_worker.worker_id
        at_d0[1].need_prefill("stream broken", lost)
        assigned = await at_d0[1].assigned.get()
        assert {lost, assigned.prefill_worker.worker_id} == {"p0", "p1"}
        at_d0[0].send_first_tokens()
        for at in at_d0:
            at.send_all()
        assert await readings.tokens() == expected(sequences)
        assert all(chunks[0].prefill_worker == assigned.prefill_worker.worker_id for chunks in readings.chunks)
        assert all(at.assigned.empty() for at in at_d0)
        assert (c.generator.stats.repairs, c.generator.stats.local_fallbacks) == (1, 0)


async def test_a_choice_that_leaves_when_it_is_asked_leaves_the_question_to_the_next() -> None:
    async with fake_cluster("p0 d0", router=APART) as c:
        sequences = choices_of(2)
        readings = Readings(c, sequences)
        at_d0 = await arrived(c, 2)
        readings.tasks[0].cancel()
        await at_d0[0].aborted.wait()
        at_d0[0].need_prefill()  # crossed with the abort
        at_d0[1].need_prefill()
        assert not (await at_d0[1].assigned.get()).HasField("prefill_worker")
        at_d0[1].send_all()
        assert await readings.tasks[1] == expected(sequences)[1]
        assert c.generator.stats.repairs == 1


async def test_repairs_of_all_choices_together_are_bounded() -> None:
    async with fake_cluster("p0 p1 p2 d0", router=APART, limits=RunLimits(max_repairs=2)) as c:
        readings = Readings(c, choices_of(3))
        at_d0 = await arrived(c, 3)
        for at in at_d0[:2]:
            at.need_prefill("lease expired", "p?")
            await at.assigned.get()
        for at in at_d0:
            at.need_prefill("lease expired", "p?")
        errors = await readings.errors()
        assert all(isinstance(error, WorkerFailed) for error in errors), errors
        for at in at_d0:
            await at.aborted.wait()
        assert c.generator.stats.repairs == 2


async def test_after_a_lost_decode_worker_each_choice_goes_on_by_itself() -> None:
    async with fake_cluster("d0 d1 d2", router=APART) as c:
        sequences = choices_of(3, max_tokens=12)
        readings = Readings(c, sequences)
        first = await arrived(c, 3)
        first[0].send_first_tokens()
        first[0].send_tokens(4)
        first[2].send_tokens(1)
        await readings.have(1)
        while len(token_ids(readings.chunks[0])) < 5 or len(token_ids(readings.chunks[2])) < 2:
            await asyncio.sleep(0)
        await first[0].session.worker.kill()
        moved = sorted(await arrived(c, 3), key=lambda at: at.seed)
        for at, num_delivered in zip(moved, (5, 1, 2), strict=True):
            assert at.session.worker is not first[0].session.worker
            assert not at.submit.choices
            assert list(at.submit.resume_token_ids) == continuation(PROMPT, num_delivered, at.seed)
            at.send_all()
        assert await readings.tokens() == expected(sequences)
        assert c.generator.stats.resubmissions == 3


@pytest.mark.parametrize("code", [grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.FAILED_PRECONDITION])
async def test_a_worker_that_has_no_room_for_a_prompt_has_none_for_any_of_its_choices(code: grpc.StatusCode) -> None:
    async with fake_cluster("d0 d1") as c:
        sequences = choices_of(3)
        readings = Readings(c, sequences)
        first = await arrived(c, 3)
        first[0].refuse(code, "not now")
        second = await arrived(c, 3)
        assert [at.seed for at in second] == [1, 2, 3]
        for at in second:
            assert at.session.worker is not first[0].session.worker
            at.send_all()
        assert await readings.tokens() == expected(sequences)
        assert [len(worker.submits) for worker in c.workers.values()] == [1, 1]  # together again: computed once
        assert num_assigned(c.membership.ledger) == 0


async def test_before_anything_has_come_the_choices_that_are_left_move_together() -> None:
    async with fake_cluster("d0 d1 d2", router=APART) as c:
        sequences = choices_of(4)
        readings = Readings(c, sequences)
        first = await arrived(c, 4)
        await readings.leave(1)
        await first[0].session.worker.kill()
        second = await arrived(c, 3)
        assert [at.seed for at in second] == [1, 3, 4]
        assert len({at.session for at in second}) == 1
        await second[0].session.worker.kill()
        third = await arrived(c, 3)
        assert [at.seed for at in third] == [1, 3, 4]
        third[0].send_first_tokens()
        for at in third:
            at.send_all()
        ended = await readings.errors()
        assert [ended[i] for i in (0, 2, 3)] == [expected(sequences)[i] for i in (0, 2, 3)]
        assert all(len(worker.submits) == 1 for worker in c.workers.values())
        c.membership.ledger.check_integrity()
        assert num_assigned(c.membership.ledger) == 0


async def test_one_that_leaves_before_it_hears_of_the_move_is_aborted_where_it_was_taken_along() -> None:
    async with fake_cluster("d0 d1", router=APART) as c:
        sequences = choices_of(3)
        slow, *others = c.generator.generate_choices(sequences)
        reading = asyncio.ensure_future(anext(others[0]))
        first = await arrived(c, 3)
        await first[0].session.worker.kill()
        second = await arrived(c, 3)
        assert [at.seed for at in second] == [1, 2, 3]
        await slow.aclose()  # has read nothing of either worker
        await second[0].aborted.wait()
        second[1].send_all()
        second[2].send_all()
        texts = [token_ids([await reading]), []]
        for text, chunks in zip(texts, others, strict=True):
            text += token_ids([chunk async for chunk in chunks])
        assert texts == expected(sequences)[1:]
        assert not any(at.aborted.is_set() for at in second[1:])
        c.membership.ledger.check_integrity()
        assert num_assigned(c.membership.ledger) == 0


async def test_those_that_go_by_themselves_stay_so() -> None:
    async with fake_cluster("d0 d1 d2 d3 d4", router=APART) as c:
        sequences = choices_of(3)
        readings = Readings(c, sequences)
        first = await arrived(c, 3)
        first[0].send_tokens(1)
        while not readings.chunks[0]:
            await asyncio.sleep(0)
        await first[0].session.worker.kill()
        second = await arrived(c, 3)
        assert not any(at.submit.choices for at in second)
        lost = second[1].session.worker
        await lost.kill()
        moved = await arrived(c, sum(at.session.worker is lost for at in second))
        assert not any(at.submit.choices for at in moved)
        for at in (*moved, *(at for at in second if at.session.worker is not lost)):
            at.send_all()
        assert await readings.tokens() == expected(sequences)


async def test_a_prompt_that_its_worker_refuses_for_what_it_is_is_refused_to_every_choice() -> None:
    async with fake_cluster("d0 d1") as c:
        readings = Readings(c, choices_of(3))
        (await arrived(c, 3))[0].refuse(grpc.StatusCode.INVALID_ARGUMENT, "can never fit")
        errors = await readings.errors()
        assert all(isinstance(e, InvalidRequest) and e.message == "can never fit" for e in errors), errors
        assert sum(len(worker.submits) for worker in c.workers.values()) == 1


async def test_a_refusal_in_the_middle_ends_those_that_live() -> None:
    async with fake_cluster("d0") as c:
        sequences = choices_of(3)
        readings = Readings(c, sequences)
        at_d0 = await arrived(c, 3)
        at_d0[0].send_first_tokens()
        at_d0[1].send_all()
        await readings.have(1)
        at_d0[0].refuse(grpc.StatusCode.DEADLINE_EXCEEDED, "too late")
        errors = await readings.errors()
        assert errors[1] == expected(sequences)[1]
        assert isinstance(errors[0], DeadlineExceeded)
        assert isinstance(errors[2], DeadlineExceeded)


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


async def test_a_storm_of_deaths_and_leaves_ends_every_choice_once() -> None:
    async with fake_cluster("p0 p1 d0 d1 d2") as c:
        prompts = [choices_of(1 + i % 4, (1, 2, i), max_tokens=8) for i in range(16)]
        all_readings = [Readings(c, sequences) for sequences in prompts]
        at_worker = await arrived(c, sum(map(len, prompts)))
        for at in at_worker:
            if at is at.choices[0]:
                at.send_first_tokens()
        for readings in all_readings:
            await readings.have(1)
        for i, readings in enumerate(all_readings):
            if i % 3 == 0:
                readings.tasks[-1].cancel()
        for worker in c.workers.values():
            worker.automatic = True
        await c.workers["d0"].kill()
        for at in at_worker:
            if at.session.worker is not c.workers["d0"]:
                at.send_all()
        for i, (readings, sequences) in enumerate(zip(all_readings, prompts, strict=True)):
            answers = await readings.errors()
            if i % 3 == 0:
                assert isinstance(answers.pop(), asyncio.CancelledError)
            assert not any(isinstance(answer, GenerationError) for answer in answers), answers
            assert answers == expected(sequences)[: len(answers)]
        assert c.generator.stats.num_active == 0
