"""Requests from end to end of the gateway's lower half, over fake workers: served, repaired, moved, ended once."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing

import grpc
import pytest

from assigned import num_assigned
from cluster.errors import (
    Cancelled,
    DeadlineExceeded,
    InvalidRequest,
    Leg,
    NoWorker,
    QueueFull,
    WorkerFailed,
    WorkerLost,
)
from cluster.generator import Generator, SequenceChunk, SequenceRequest, StageTimes
from cluster.request_run import RunLimits
from cluster.router import RouterConfig
from cluster.worker_info import Role
from cluster.worker_link import LinkConfig, LinkState
from engine.kvcache.block_hash import hash_blocks, root_hash
from engine.sampling_params import FinishReason, SamplingParams
from fake_cluster import FakeCluster, fake_cluster, request, token_ids
from fake_worker import BLOCK_SIZE, FakeWorker, continuation

APART = RouterConfig(max_local_prefill_tokens=0)


class Reading:
    """A client that reads in the background."""

    def __init__(self, c: FakeCluster, sequence: SequenceRequest) -> None:
        self.chunks: list[SequenceChunk] = []
        self._arrived = asyncio.Event()
        self.task = asyncio.create_task(self._read(c.generator, sequence))

    async def _read(self, generator: Generator, sequence: SequenceRequest) -> list[int]:
        async with aclosing(generator.generate(sequence)) as chunks:
            async for chunk in chunks:
                self.chunks.append(chunk)
                self._arrived.set()
        return token_ids(self.chunks)

    async def has(self, num_tokens: int) -> None:
        while len(token_ids(self.chunks)) < num_tokens:
            self._arrived.clear()
            await self._arrived.wait()


# --- served


async def test_a_request_is_served_with_all_that_it_asked_for_on_the_wire() -> None:
    async with fake_cluster("p0 d0", router=APART) as c:
        params = SamplingParams(
            max_tokens=3, temperature=0.5, top_k=4, seed=-(2**62), stop_token_ids=(9,), logit_bias={3: -1.5}, logprobs=2
        )
        sequence = request(tuple(range(10)), params=params, cache_salt="tenant", priority=-2, timeout_s=30.0)
        reading = Reading(c, sequence)
        at_d0 = await c.workers["d0"].next_request()
        submit = at_d0.submit
        assert list(submit.prompt_token_ids) == list(range(10))
        assert (submit.cache_salt, submit.priority, submit.timeout_ms) == ("tenant", -2, 30_000)
        assert submit.plan.prefill_worker.worker_id == "p0"
        assert submit.plan.prefill_worker.address == c.workers["p0"].address
        assert submit.plan.prefill_worker.instance_id == c.workers["p0"].instance_id
        sampling = submit.sampling_params
        assert (sampling.max_tokens, sampling.temperature, sampling.top_k, sampling.seed) == (3, 0.5, 4, -(2**62))
        assert (list(sampling.stop_token_ids), dict(sampling.logit_bias), sampling.logprobs) == ([9], {3: -1.5}, 2)
        at_d0.send_all()
        assert await reading.task == continuation(range(10), 3, seed=-(2**62))
        assert [chunk.finish_reason for chunk in reading.chunks] == [None, None, FinishReason.LENGTH]
        assert all((chunk.prefill_worker, chunk.decode_worker) == ("p0", "d0") for chunk in reading.chunks)
        assert reading.chunks[-1].stages == StageTimes(0.0, 0.0, 0.0, 1.5)


async def test_a_short_prompt_is_prefilled_on_the_decode_worker() -> None:
    async with fake_cluster("p0 d0", automatic=True, router=RouterConfig(max_local_prefill_tokens=3)) as c:
        assert (await c.collect(request((1, 2, 3))))[0].prefill_worker == "d0"
        assert (await c.collect(request((1, 2, 3, 4))))[0].prefill_worker == "p0"
        assert c.generator.stats.local_fallbacks == 0


async def test_without_a_prefill_worker_it_is_local_and_counted() -> None:
    async with fake_cluster("d0", automatic=True, router=APART) as c:
        assert (await c.collect(request()))[0].prefill_worker == "d0"
        assert c.generator.stats.local_fallbacks == 1


async def test_a_cached_prefix_is_found_by_hash_salt_and_all_and_a_stale_hit_is_counted() -> None:
    async with fake_cluster("d0 d1", automatic=True, router=RouterConfig(recent_request_s=0.0)) as c:
        prompt = tuple(range(20))
        d1 = c.workers["d1"]
        hashes = hash_blocks(root_hash(b"fake-model", "tenant"), prompt, BLOCK_SIZE)
        d1.store(*hashes)
        while c.membership.directory.num_blocks(d1.instance_id) < 5:
            await asyncio.sleep(0)
        d1.num_cached_tokens = 16
        for _ in range(3):
            chunks = await c.collect(request(prompt, cache_salt="tenant"))
            assert (chunks[0].decode_worker, chunks[0].num_cached_tokens) == ("d1", 16)
        assert c.generator.stats.planned_cached_tokens == 3 * 16
        assert c.generator.stats.stale_hits == 0
        d1.num_cached_tokens = 8
        await c.collect(request(prompt, cache_salt="tenant"))
        assert c.generator.stats.stale_hits == 1
        await c.collect(request(prompt, cache_salt="other"))
        assert c.generator.stats.planned_cached_tokens == 4 * 16


# --- refused before anything is started


@pytest.mark.parametrize(
    ("sequence", "why", "param"),
    [
        (request(()), "the prompt is empty", "prompt"),
        (request((1, 1000)), "token id 1000 of prompt is out of range: the vocabulary has the ids 0 to 999", "prompt"),
        (request((-1,)), "token id -1 of prompt", "prompt"),
        (
            request((1,) * 90, max_tokens=11),
            r"length is 100 tokens. However, you requested 101 tokens \(90 in the prompt, 11 for the completion\)",
            "max_tokens",
        ),
        (request(params=SamplingParams(max_tokens=1, stop_token_ids=(1000,))), "id 1000 of stop", "stop_token_ids"),
        (request(params=SamplingParams(max_tokens=1, logit_bias={-4: 1.0})), "token id -4 of logit", "logit_bias"),
        (request(timeout_s=0.0), "timeout must be above 0 seconds, not 0", "timeout"),
        (request(priority=2**31), "priority must be a 32-bit integer, not 2147483648", "priority"),
    ],
)  # fmt: skip
async def test_bad_input_is_refused_with_a_clear_sentence_and_costs_nothing(
    sequence: SequenceRequest, why: str, param: str
) -> None:
    async with fake_cluster("d0") as c:
        with pytest.raises(InvalidRequest, match=why) as caught:
            await c.collect(sequence)
        assert caught.value.param == param
        assert c.workers["d0"].received == []


async def test_a_request_that_fills_the_context_exactly_is_served() -> None:
    async with fake_cluster("d0", automatic=True) as c:
        assert len(await c.tokens(request((1,) * 90, max_tokens=10))) == 10


async def test_places_of_a_call_are_taken_all_at_once_or_not_at_all() -> None:
    async with fake_cluster("d0", automatic=True, max_concurrent=4) as c:
        first = [request() for _ in range(3)]
        with c.generator.admit(first):
            with (
                pytest.raises(QueueFull, match="3 requests are in flight, and this call would add 2; "),
                c.generator.admit([request(), request()]),
            ):
                raise AssertionError("admitted")
            assert c.generator.stats.queue_full == 2
            assert c.workers["d0"].received == []
            assert len(await c.tokens(request())) == 6  # the fourth place
            for sequence in first:
                assert len(await c.tokens(sequence)) == 6
        with c.generator.admit([request() for _ in range(4)]):
            pass  # none is begun: their places are free again
        with c.generator.admit([request() for _ in range(4)]):
            pass


async def test_a_call_with_one_bad_sequence_takes_no_place() -> None:
    async with fake_cluster("d0", automatic=True, max_concurrent=2) as c:
        twice = request()
        for bad in ([request(), request((1, 1000))], [twice, twice]):
            with pytest.raises(InvalidRequest), c.generator.admit(bad):
                raise AssertionError("admitted")
        assert len(await c.tokens(twice)) == 6
        with c.generator.admit([request(), request()]):
            pass


async def test_more_requests_than_allowed_are_refused_and_room_is_made_by_every_end() -> None:
    async with fake_cluster("d0", max_concurrent=2) as c:
        readings = [Reading(c, request()) for _ in range(2)]
        at_worker = [await c.next_request() for _ in range(2)]
        with pytest.raises(QueueFull, match="2 requests are in flight"):
            await c.tokens(request())
        assert c.generator.stats.queue_full == 1
        at_worker[0].send_all()
        await readings[0].task
        third = Reading(c, request())
        (await c.next_request()).send_all()
        await third.task
        readings[1].task.cancel()
        await asyncio.gather(readings[1].task, return_exceptions=True)
        assert c.generator.stats.num_active == 0


async def test_two_requests_of_one_id_at_a_time_are_refused_and_one_after_the_other_are_not() -> None:
    async with fake_cluster("d0") as c:
        sequence = request()
        reading = Reading(c, sequence)
        at_worker = await c.next_request()
        with pytest.raises(InvalidRequest, match="in flight") as caught:
            await c.tokens(sequence)
        assert caught.value.param == "request_id"
        at_worker.send_all()
        await reading.task
        again = Reading(c, sequence)
        second = await c.next_request()
        assert second.request_id != at_worker.request_id  # on the wire
        second.send_all()
        assert await again.task == await reading.task


@pytest.mark.parametrize("names", ["", "p0"])
async def test_without_a_decode_worker_it_fails_at_once_saying_who_is_missing(names: str) -> None:
    async with fake_cluster(names) as c:
        with pytest.raises(NoWorker, match="no decode worker is ready" if names else "has been reached"):
            await c.tokens(request())


# --- the decode worker is lost


async def test_a_request_whose_decode_worker_dies_goes_on_elsewhere_identically() -> None:
    async with fake_cluster("d0 d1", router=APART) as c:
        reading = Reading(c, request(max_tokens=12))
        first = await c.next_request()
        first.send_tokens(5)
        await reading.has(5)
        await first.session.worker.kill()
        second = await c.next_request()
        assert second.session.worker is not first.session.worker
        assert list(second.submit.resume_token_ids) == continuation([1, 2, 3], 5)
        assert list(second.submit.prompt_token_ids) == [1, 2, 3]
        second.send_all()
        assert await reading.task == continuation([1, 2, 3], 12)
        assert {chunk.decode_worker for chunk in reading.chunks} == {"d0", "d1"}
        assert c.generator.stats.resubmissions == 1


async def test_tokens_that_had_arrived_but_were_not_read_are_delivered_before_it_moves() -> None:
    async with fake_cluster("d0 d1") as c:
        async with aclosing(c.generator.generate(request(max_tokens=12))) as chunks:
            first_chunk = asyncio.ensure_future(anext(chunks))
            first = await c.next_request()
            first.send_tokens(4)
            received = [await first_chunk]
            first.session.end()
            while c.membership.session(first.session.worker.instance_id):
                await asyncio.sleep(0)
            rest = asyncio.ensure_future(drain(chunks, received))
            second = await c.next_request()
            assert list(second.submit.resume_token_ids) == continuation([1, 2, 3], 4)
            second.send_all()
            await rest
        assert token_ids(received) == continuation([1, 2, 3], 12)


async def drain(chunks: AsyncIterator[SequenceChunk], received: list[SequenceChunk]) -> None:
    async for chunk in chunks:
        received.append(chunk)


async def test_the_resumed_request_is_routed_by_what_it_has_generated_as_well() -> None:
    async with fake_cluster("d0 d1 d2") as c:
        reading = Reading(c, request(max_tokens=30))
        first = await c.next_request()
        first.send_tokens(20)
        await reading.has(20)
        whole = [1, 2, 3, *continuation([1, 2, 3], 20)]
        others = [w for name, w in sorted(c.workers.items()) if w is not first.session.worker]
        holder = others[1]
        holder.store(*hash_blocks(root_hash(b"fake-model"), whole, BLOCK_SIZE))
        while c.membership.directory.num_blocks(holder.instance_id) < 5:
            await asyncio.sleep(0)
        await first.session.worker.kill()
        second = await c.next_request()
        assert second.session.worker is holder
        second.send_all()
        assert await reading.task == continuation([1, 2, 3], 30)


async def test_a_request_is_not_moved_for_ever() -> None:
    async with fake_cluster("d0 d1 d2 d3", limits=RunLimits(max_resubmissions=2)) as c:
        reading = Reading(c, request(max_tokens=12))
        for i in range(3):
            at_worker = await c.next_request()
            at_worker.send_tokens()
            await reading.has(i + 1)
            at_worker.session.end()
        with pytest.raises(WorkerLost, match="had been moved 2 times before") as caught:
            await reading.task
        assert caught.value.leg is Leg.DECODE
        assert token_ids(reading.chunks) == continuation([1, 2, 3], 3)
        assert c.generator.stats.resubmissions == 2


async def test_the_only_decode_worker_lost_is_an_error_that_names_it() -> None:
    async with fake_cluster("p0 d0") as c:
        reading = Reading(c, request())
        await c.next_request()
        await c.workers["d0"].kill()
        with pytest.raises(
            WorkerLost, match=r"decode worker d0 at .* was lost: .*; no decode worker is ready"
        ) as caught:
            await reading.task
        assert (caught.value.leg, caught.value.worker_id) == (Leg.DECODE, "d0")


async def test_a_draining_or_full_worker_is_passed_over_for_another() -> None:
    for code in (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.RESOURCE_EXHAUSTED):
        async with fake_cluster("d0 d1") as c:
            reading = Reading(c, request())
            first = await c.next_request()
            first.refuse(code, "not now")
            second = await c.next_request()
            assert second.session.worker is not first.session.worker
            second.send_all()
            assert await reading.task == continuation([1, 2, 3], 6)


async def test_all_workers_full_is_queue_full() -> None:
    async with fake_cluster("d0 d1") as c:
        reading = Reading(c, request())
        for _ in range(2):
            (await c.next_request()).refuse(grpc.StatusCode.RESOURCE_EXHAUSTED, "100 requests are waiting")
        with pytest.raises(QueueFull, match="100 requests are waiting"):
            await reading.task


async def test_a_request_that_its_worker_refuses_for_what_it_is_is_not_tried_elsewhere() -> None:
    async with fake_cluster("d0 d1") as c:
        reading = Reading(c, request())
        (await c.next_request()).refuse(grpc.StatusCode.INVALID_ARGUMENT, "can never fit")
        with pytest.raises(InvalidRequest, match="can never fit"):
            await reading.task
        assert sum(len(worker.received) for worker in c.workers.values()) == 1


# --- the prefill worker is lost


async def test_another_prefill_worker_is_named_and_the_client_does_not_notice() -> None:
    async with fake_cluster("p0 p1 d0", router=APART) as c:
        reading = Reading(c, request())
        at_d0 = await c.workers["d0"].next_request()
        lost = at_d0.submit.plan.prefill_worker.worker_id
        at_d0.need_prefill("stream broken", lost)
        assigned = await at_d0.assigned.get()
        assert {lost, assigned.prefill_worker.worker_id} == {"p0", "p1"}
        at_d0.send_all()
        assert await reading.task == continuation([1, 2, 3], 6)
        assert reading.chunks[0].prefill_worker == assigned.prefill_worker.worker_id
        assert (c.generator.stats.repairs, c.generator.stats.local_fallbacks) == (1, 0)


async def test_with_no_other_prefill_worker_left_the_decode_worker_prefills() -> None:
    async with fake_cluster("p0 d0", router=APART) as c:
        reading = Reading(c, request())
        at_d0 = await c.workers["d0"].next_request()
        at_d0.need_prefill()
        assert not (await at_d0.assigned.get()).HasField("prefill_worker")
        at_d0.send_all()
        await reading.task
        assert reading.chunks[0].prefill_worker == "d0"
        assert (c.generator.stats.repairs, c.generator.stats.local_fallbacks) == (1, 1)


async def test_a_prefill_worker_of_another_host_is_neither_planned_nor_named_in_a_repair() -> None:
    async with fake_cluster("", router=APART) as c:
        for name, role, host in (("p0", Role.PREFILL, "A"), ("p1", Role.PREFILL, "B"), ("d0", Role.DECODE, "A")):
            await c.join(FakeWorker(name, role, host_id=host))
        reading = Reading(c, request())
        at_d0 = await c.workers["d0"].next_request()
        assert at_d0.submit.plan.prefill_worker.worker_id == "p0"
        at_d0.need_prefill("stream broken", "p0")
        assert not (await at_d0.assigned.get()).HasField("prefill_worker")
        at_d0.send_all()
        await reading.task
        assert (c.generator.stats.repairs, c.generator.stats.local_fallbacks) == (1, 1)


async def test_repairs_are_bounded_and_the_error_names_the_leg() -> None:
    async with fake_cluster("p0 p1 p2 p3 p4 d0", router=APART) as c:
        reading = Reading(c, request())
        at_d0 = await c.workers["d0"].next_request()
        failed = [at_d0.submit.plan.prefill_worker.worker_id]
        for _ in range(3):
            at_d0.need_prefill("lease expired", failed[-1])
            failed.append((await at_d0.assigned.get()).prefill_worker.worker_id)
        assert len(set(failed)) == 4
        at_d0.need_prefill("lease expired", failed[-1])
        with pytest.raises(WorkerFailed, match=f"prefill worker {failed[-1]}: lease expired; 3 others") as caught:
            await reading.task
        assert (caught.value.leg, caught.value.worker_id) == (Leg.PREFILL, failed[-1])
        await at_d0.aborted.wait()
        assert c.generator.stats.repairs == 3


async def test_a_prefill_worker_that_restarts_serves_the_next_request() -> None:
    async with fake_cluster("p0 d0", router=APART, link=LinkConfig(first_retry_s=0.1, max_retry_s=0.1)) as c:
        p0 = c.workers["p0"]
        link = c.membership.add_worker(p0.address)
        reading = Reading(c, request())
        at_d0 = await c.workers["d0"].next_request()
        await p0.kill()
        at_d0.need_prefill()
        await at_d0.assigned.get()
        at_d0.send_all()
        await reading.task
        new = await c.start(FakeWorker("p0", Role.PREFILL), p0.address)
        while link.state is not LinkState.READY or link.info is None or link.info.instance_id != new.instance_id:
            c.clock.advance(0.1)
            await c.membership._changed.wait()
        reading = Reading(c, request())
        at_d0 = await c.workers["d0"].next_request()
        assert at_d0.submit.plan.prefill_worker.instance_id == new.instance_id
        at_d0.send_all()
        await reading.task


@pytest.mark.parametrize("num_tokens", [0, 2])
async def test_a_request_cut_off_by_the_end_of_the_gateway_is_told_so(num_tokens: int) -> None:
    async with fake_cluster("p0 d0 d1") as c:
        reading = Reading(c, request())
        (await c.next_request()).send_tokens(num_tokens)
        await reading.has(num_tokens)
        await c.membership.close()
        with pytest.raises(NoWorker, match=r"^the server is shutting down$"):
            await reading.task
        with pytest.raises(NoWorker, match=r"^the server is shutting down$"):
            await c.tokens(request())
        assert c.generator.stats.resubmissions == 0


# --- ends


async def test_closing_early_aborts_at_the_worker() -> None:
    async with fake_cluster("d0") as c:
        async with aclosing(c.generator.generate(request())) as chunks:
            first_chunk = asyncio.ensure_future(anext(chunks))
            at_d0 = await c.workers["d0"].next_request()
            at_d0.send_tokens()
            await first_chunk
        await at_d0.aborted.wait()
        assert num_assigned(c.membership.ledger) == 0


async def test_cancelling_while_waiting_aborts_at_the_worker() -> None:
    async with fake_cluster("d0") as c:
        reading = Reading(c, request())
        at_d0 = await c.workers["d0"].next_request()
        reading.task.cancel()
        await at_d0.aborted.wait()
        with pytest.raises(asyncio.CancelledError):
            await reading.task


async def test_closing_after_the_last_chunk_aborts_nothing() -> None:
    async with fake_cluster("d0", automatic=True) as c:
        async with aclosing(c.generator.generate(request())) as chunks:
            async for chunk in chunks:
                if chunk.finish_reason is not None:
                    break
        assert not c.workers["d0"].received[0].aborted.is_set()


@pytest.mark.parametrize("num_tokens", [0, 2])
async def test_a_deadline_ends_it_here_and_at_the_worker(num_tokens: int) -> None:
    async with fake_cluster("d0") as c:
        reading = Reading(c, request(timeout_s=5.0))
        at_d0 = await c.workers["d0"].next_request()
        at_d0.send_tokens(num_tokens)
        await reading.has(num_tokens)
        c.clock.advance(4.9)
        assert not at_d0.aborted.is_set()
        c.clock.advance(0.1)
        with pytest.raises(DeadlineExceeded, match="within 5 s"):
            await reading.task
        await at_d0.aborted.wait()
        assert len(token_ids(reading.chunks)) == num_tokens


async def test_a_deadline_holds_over_a_move() -> None:
    async with fake_cluster("d0 d1", limits=RunLimits(timeout_s=8.0)) as c:
        reading = Reading(c, request())
        first = await c.next_request()
        c.clock.advance(5.0)
        first.session.end()
        second = await c.next_request()
        assert second.submit.timeout_ms == 3000
        c.clock.advance(3.0)
        with pytest.raises(DeadlineExceeded):
            await reading.task
        await second.aborted.wait()


async def test_a_client_that_stops_reading_is_aborted_and_disturbs_nobody() -> None:
    async with fake_cluster("d0", link=LinkConfig(max_buffered=4)) as c:
        async with aclosing(c.generator.generate(request(max_tokens=50))) as slow:
            first_chunk = asyncio.ensure_future(anext(slow))
            at_d0 = await c.workers["d0"].next_request()
            at_d0.send_tokens()
            received = [await first_chunk]
            other = Reading(c, request())
            at_d0.send_tokens(10)
            (await c.workers["d0"].next_request()).send_all()
            await other.task
            await at_d0.aborted.wait()
            with pytest.raises(Cancelled, match="4 steps behind"):
                await drain(slow, received)
        assert token_ids(received) == continuation([1, 2, 3], 5)


@pytest.mark.parametrize("order", ["abort first", "finish first"])
async def test_an_abort_and_the_last_token_may_cross_in_either_order(order: str) -> None:
    async with fake_cluster("d0") as c:
        reading = Reading(c, request())
        at_d0 = await c.workers["d0"].next_request()
        at_d0.send_tokens()
        await reading.has(1)
        if order == "abort first":
            reading.task.cancel()
            at_d0.send_all()
        else:
            at_d0.send_all()
            await reading.has(6)
            reading.task.cancel()
        await asyncio.gather(reading.task, return_exceptions=True)
        later = Reading(c, request())
        (await c.workers["d0"].next_request()).send_all()
        assert await later.task == continuation([1, 2, 3], 6)
        assert c.generator.stats.num_active == 0


async def test_a_storm_of_deaths_and_leaves_ends_every_request_once() -> None:
    async with fake_cluster("p0 p1 d0 d1 d2") as c:
        readings = [Reading(c, request((1, 2, i), max_tokens=8)) for i in range(30)]
        at_worker = [await c.next_request() for _ in range(30)]
        for i, at in enumerate(at_worker):
            at.send_tokens(1 + i % 5)
            await readings[at.submit.prompt_token_ids[2]].has(1 + i % 5)
        left = {i for i in range(30) if i % 3 == 0}
        for i in left:
            readings[i].task.cancel()
        for worker in c.workers.values():
            worker.automatic = True
        await c.workers["d0"].kill()
        for at in at_worker:
            if at.session.worker is not c.workers["d0"] and not at.aborted.is_set():
                at.send_all()
        for i, reading in enumerate(readings):
            if i in left:
                with pytest.raises(asyncio.CancelledError):
                    await reading.task
            else:
                assert await reading.task == continuation([1, 2, i], 8)
        assert c.generator.stats.num_active == 0
