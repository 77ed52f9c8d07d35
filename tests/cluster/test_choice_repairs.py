"""Choices of one prompt whose worker is lost, over fake workers: repaired and moved together, or each by itself."""

import asyncio

import grpc
import pytest

from assigned import num_assigned
from cluster.errors import DeadlineExceeded, GenerationError, InvalidRequest, WorkerFailed
from cluster.request_run import RunLimits
from fake_cluster import fake_cluster, token_ids
from fake_worker import continuation
from gateway_choices import APART, PROMPT, Readings, arrived, choices_of, expected


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
