"""A gateway's session: what is queued goes out in order, and a gateway that does not read is left."""

import logging

import grpc
import pytest

from decode_worker import DecodeWorker
from engine.config import EngineConfig
from engine.sampling_params import SamplingParams
from gateway_end import GatewayEnd
from kvtransfer.sampling_wire import sampling_params_to_wire
from tandem.v1 import worker_pb2 as pb
from tandem.v1 import worker_pb2_grpc
from worker.config import WorkerConfig
from worker.session import MAX_BACKLOG, Session


async def drain(session: Session) -> list[int]:
    return [response.load.num_running async for response in session.outgoing()]


def load(number: int) -> pb.SessionResponse:
    return pb.SessionResponse(load=pb.Load(num_running=number))


async def test_messages_leave_in_order_until_the_session_is_closed() -> None:
    session = Session(on_broken=lambda: None)
    for number in range(3):
        session.send(load(number))
    session.close()
    session.close()
    assert await drain(session) == [0, 1, 2]


async def test_a_gateway_that_does_not_read_is_left_once_and_costs_no_more_memory() -> None:
    broken: list[str] = []
    session = Session(on_broken=lambda: broken.append("left"))
    for number in range(MAX_BACKLOG + 10):
        session.send(load(number))
    assert broken == ["left"]
    session.close()
    assert len(await drain(session)) == MAX_BACKLOG


def test_a_refusal_is_logged_with_its_request_and_without_its_words(caplog: pytest.LogCaptureFixture) -> None:
    session = Session(on_broken=lambda: None)
    with caplog.at_level(logging.INFO):
        session.refuse("w-1-cmpl-7", 3, "what was asked: the secret")
    (record,) = caplog.records
    assert (record.getMessage(), record.request_id) == ("refused with status 3", "w-1-cmpl-7")  # type: ignore[attr-defined]


async def test_a_stream_that_hangs_in_a_write_is_ended_and_its_requests_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("worker.session.MAX_BACKLOG", 200)
    engine = EngineConfig(num_blocks=4096, max_model_len=30_000, max_num_seqs=8)
    worker = DecodeWorker(WorkerConfig(engine=engine, worker_id="d0", executor="hash"))
    address = await worker.start()
    async with GatewayEnd(address) as watcher, grpc.aio.insecure_channel(address) as channel:
        call = worker_pb2_grpc.WorkerStub(channel).Session()
        params = SamplingParams(max_tokens=29_000, temperature=0.0, logprobs=20)
        for i in range(2):  # their tokens and logprobs fill every buffer on the way, and nobody reads
            submit = pb.Submit(
                request_id=f"r{i}", prompt_token_ids=[i], sampling_params=sampling_params_to_wire(params)
            )
            await call.write(pb.SessionRequest(submit=submit))
        # They have run, for blocks are cached; long before their last tokens they run no more.
        await watcher.until(
            lambda: watcher.load.num_cached_blocks > 0 and not watcher.load.num_running + watcher.load.num_active_blocks
        )
        call.cancel()
    await worker.stop()
