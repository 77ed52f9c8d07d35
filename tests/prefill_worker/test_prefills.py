"""A prefill worker alone: what it computes for others, and how it ends in the middle of it."""

import asyncio
import threading
from dataclasses import replace

import grpc
import pytest

from engine.config import EngineConfig
from engine.executor import ModelOutput, SchedulerOutput
from engine.hash_executor import HashExecutor, expected_prompt_logprobs, next_token
from engine.kvcache.block_hash import hash_blocks, root_hash
from engine.sampling_params import SamplingParams
from gateway_end import PATIENCE_S
from kvtransfer.messages import CachedSource, Complete, Open, PrefillSource, Ready
from kvtransfer.sampling_wire import prompt_logprobs_from_wire
from kvtransfer.wire import request_to_wire, response_from_wire
from prefill_worker import PrefillWorker
from step_clock import StepClock
from tandem.v1 import exchange_pb2_grpc
from worker.config import WorkerConfig
from worker.engine_thread import EngineThread

ENGINE = EngineConfig(num_blocks=65, max_model_len=1024, max_num_batched_tokens=64)


def open_of(token_ids: list[int], **changes: object) -> Open:
    source = PrefillSource(tuple(token_ids), len(token_ids), SamplingParams(max_tokens=4, temperature=0.0))
    fields = {
        "handoff_id": "h",
        "request_id": "r",
        "consumer_instance_id": "c",
        "fingerprint": b"hash-executor-v1",
        "timeout_s": PATIENCE_S,
        "source": source,
        **changes,
    }
    return Open(**fields)  # type: ignore[arg-type]


async def read_to_the_end(call: grpc.aio.StreamStreamCall) -> grpc.StatusCode:
    """The status comes behind the last message."""
    try:
        async with asyncio.timeout(PATIENCE_S):
            async for _ in call:
                pass
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


async def status_of(address: str, open: Open) -> grpc.StatusCode:
    async with grpc.aio.insecure_channel(address) as channel:
        call = exchange_pb2_grpc.KvExchangeStub(channel).Handoff()
        await call.write(request_to_wire(open))
        return await read_to_the_end(call)


@pytest.mark.parametrize(
    ("open", "code"),
    [
        (open_of([1, 2, 1000]), grpc.StatusCode.INVALID_ARGUMENT),  # outside the vocabulary
        (open_of(list(range(900)) * 2), grpc.StatusCode.INVALID_ARGUMENT),  # longer than the context
        (open_of([1, 2, 3], fingerprint=b"another model!!!"), grpc.StatusCode.FAILED_PRECONDITION),
    ],
    ids=["token id", "too long", "fingerprint"],
)
async def test_a_hand_off_that_cannot_be_is_refused_and_nothing_is_held(open: Open, code: grpc.StatusCode) -> None:
    worker = PrefillWorker(WorkerConfig(engine=ENGINE, worker_id="p0", executor="hash"))
    address = await worker.start()
    assert await status_of(address, open) is code
    await worker.stop()  # proves that nothing is held


async def test_a_worker_stopped_in_the_middle_of_a_prefill_ends_with_a_whole_pool(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A step that ends when its hand-off is over already: what it filled is pinned, and nobody waits for it."""
    loop = asyncio.get_running_loop()
    computing, stopping = asyncio.Event(), threading.Event()
    execute, stop = HashExecutor.execute, EngineThread.stop

    def execute_until_stopped(self: HashExecutor, step: SchedulerOutput) -> ModelOutput:
        loop.call_soon_threadsafe(computing.set)
        assert stopping.wait(PATIENCE_S)
        return execute(self, step)

    async def stop_after_hand_offs(self: EngineThread) -> None:
        stopping.set()
        await stop(self)

    monkeypatch.setattr(HashExecutor, "execute", execute_until_stopped)
    monkeypatch.setattr(EngineThread, "stop", stop_after_hand_offs)
    worker = PrefillWorker(WorkerConfig(engine=ENGINE, worker_id="p0", executor="hash"))
    address = await worker.start()
    async with grpc.aio.insecure_channel(address) as channel:
        call = exchange_pb2_grpc.KvExchangeStub(channel).Handoff()
        await call.write(request_to_wire(open_of([i % 1000 for i in range(900)])))
        async with asyncio.timeout(PATIENCE_S):
            await computing.wait()
            await worker.stop()  # proves that nothing is held
        assert await read_to_the_end(call) is not grpc.StatusCode.OK


async def completed(address: str, open: Open) -> Complete:
    """What a hand-off ends computing with; its stream is left then."""
    async with grpc.aio.insecure_channel(address) as channel:
        call = exchange_pb2_grpc.KvExchangeStub(channel).Handoff()
        await call.write(request_to_wire(open))
        async with asyncio.timeout(PATIENCE_S):
            async for response in call:
                if isinstance(message := response_from_wire(response), Complete):
                    call.cancel()
                    return message
    raise AssertionError("the hand-off ended before it was complete")


@pytest.mark.parametrize(("length", "num_steps"), [(1, 1), (64, 1), (65, 2), (200, 4)])
async def test_the_step_that_begins_a_prefill_is_part_of_it(
    monkeypatch: pytest.MonkeyPatch, length: int, num_steps: int
) -> None:
    clock = StepClock()
    clock.install(monkeypatch)
    worker = PrefillWorker(WorkerConfig(engine=ENGINE, worker_id="p0", executor="hash"), clock.time)
    complete = await completed(await worker.start(), open_of(list(range(length))))
    assert (complete.queued_s, complete.prefill_s) == (0.0, float(num_steps))
    await worker.stop()


@pytest.mark.parametrize("length", [1, 16, 100, 300])
@pytest.mark.parametrize("num_choices", [1, 2, 8])
async def test_first_tokens_of_all_choices_come_of_one_computation_and_leave_together(
    length: int, num_choices: int
) -> None:
    worker = PrefillWorker(WorkerConfig(engine=ENGINE, worker_id="p0", executor="hash"))
    address = await worker.start()
    token_ids = [i * i % 1000 for i in range(length)]
    params = SamplingParams(max_tokens=4, seed=5, prompt_logprobs=2)
    seeds = tuple(5 - 3 * i for i in range(num_choices)) if num_choices > 1 else ()
    source = PrefillSource(tuple(token_ids), length, params, seeds=seeds)
    complete = await completed(address, open_of(token_ids, source=source))
    expected = [next_token(token_ids, replace(params, seed=seed), 1000) for seed in seeds or (5,)]
    assert list(complete.first_tokens) == expected
    assert complete.prompt_logprobs is not None
    logprobs = prompt_logprobs_from_wire(complete.prompt_logprobs, token_ids)
    assert logprobs == expected_prompt_logprobs(token_ids, params, 1000)
    assert (complete.num_tokens, complete.num_cached_tokens) == (length, 0)
    assert worker._stats.num_computed_tokens == length
    assert worker._stats.num_sampled_tokens == num_choices
    await worker.stop()  # proves that nothing is held


async def test_choices_that_are_to_resume_are_refused_and_nothing_is_held() -> None:
    worker = PrefillWorker(WorkerConfig(engine=ENGINE, worker_id="p0", executor="hash"))
    address = await worker.start()
    source = PrefillSource((1, 2, 3, 4), 3, SamplingParams(max_tokens=4), seeds=(1, 2))
    assert await status_of(address, open_of([], source=source)) is grpc.StatusCode.INVALID_ARGUMENT
    await worker.stop()


async def announced_fences(address: str, open: Open) -> set[int | None]:
    """Of the blocks that a hand-off announces until it is complete."""
    fences: set[int | None] = set()
    async with grpc.aio.insecure_channel(address) as channel:
        call = exchange_pb2_grpc.KvExchangeStub(channel).Handoff()
        await call.write(request_to_wire(open))
        async with asyncio.timeout(PATIENCE_S):
            async for response in call:
                message = response_from_wire(response)
                if isinstance(message, Complete):
                    call.cancel()
                    return fences
                if isinstance(message, Ready):
                    fences.add(message.fence)
    raise AssertionError("the hand-off ended before it was complete")


async def test_blocks_of_a_step_that_may_still_run_are_announced_with_its_fence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on a GPU: both for those that it computes and for those that it lends out of its cache."""
    execute = HashExecutor.execute

    def execute_late(self: HashExecutor, step: SchedulerOutput) -> ModelOutput:
        return replace(execute(self, step), fence=5)

    monkeypatch.setattr(HashExecutor, "execute", execute_late)
    worker = PrefillWorker(WorkerConfig(engine=ENGINE, worker_id="p0", executor="hash"))
    address = await worker.start()
    token_ids = [i % 1000 for i in range(200)]
    assert await announced_fences(address, open_of(token_ids)) == {5}
    hashes = hash_blocks(root_hash(b"hash-executor-v1", ""), token_ids, ENGINE.block_size)
    cached = open_of(token_ids, handoff_id="lent", source=CachedSource(tuple(hashes)))
    assert await announced_fences(address, cached) == {5}
    await worker.stop()
