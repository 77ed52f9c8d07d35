"""A prefill worker alone: what it computes for others, and how it ends in the middle of it."""

import asyncio

import grpc
import pytest

from engine.config import EngineConfig
from engine.executor import ModelOutput, SchedulerOutput
from engine.hash_executor import HashExecutor
from engine.sampling_params import SamplingParams
from gateway_end import PATIENCE_S
from kvtransfer.messages import Open, PrefillSource
from kvtransfer.wire import request_to_wire
from prefill_worker import PrefillWorker
from tandem.v1 import exchange_pb2_grpc
from worker.config import WorkerConfig

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


async def test_a_worker_stopped_in_the_middle_of_prefills_ends_with_a_whole_pool(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What the last step filled is pinned, and on its way to the loop, when the end comes."""
    loop = asyncio.get_running_loop()
    computing = asyncio.Event()
    execute = HashExecutor.execute

    def and_tell(self: HashExecutor, step: SchedulerOutput) -> ModelOutput:
        loop.call_soon_threadsafe(computing.set)
        return execute(self, step)

    monkeypatch.setattr(HashExecutor, "execute", and_tell)
    for _ in range(10):  # the end comes at other moments of a step
        computing.clear()
        worker = PrefillWorker(WorkerConfig(engine=ENGINE, worker_id="p0", executor="hash"))
        address = await worker.start()
        async with grpc.aio.insecure_channel(address) as channel:
            call = exchange_pb2_grpc.KvExchangeStub(channel).Handoff()
            await call.write(request_to_wire(open_of([i % 1000 for i in range(900)])))
            async with asyncio.timeout(PATIENCE_S):
                await computing.wait()
                await worker.stop()
            assert await read_to_the_end(call) is not grpc.StatusCode.OK
