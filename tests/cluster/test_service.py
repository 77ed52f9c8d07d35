"""The Generation service over real gRPC, on a fake generator."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from cluster.errors import DeadlineExceeded, NoWorker, QueueFull, WorkerFailed
from cluster.service import GenerationService
from fake_generator import FakeGenerator, served_model
from gateway_api import Api, embedded_tokenizer, says, ticking_clock
from tandem.v1 import generation_pb2 as pb
from tandem.v1 import generation_pb2_grpc, sampling_pb2


@asynccontextmanager
async def serving(generator: FakeGenerator | None = None) -> AsyncIterator[tuple[Any, FakeGenerator]]:
    api = Api(generator)
    server = grpc.aio.server()
    service = GenerationService(api.text, version="1.2.3", clock=ticking_clock())
    generation_pb2_grpc.add_GenerationServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    options = (("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1))
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:
        try:
            yield generation_pb2_grpc.GenerationStub(channel), api.generator
        finally:
            await server.stop(None)


def asking(text: str = "Hi", *, stream: bool = True, **params: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        request_id="r1", text=text, stream=stream, sampling_params=sampling_pb2.SamplingParams(**params)
    )


async def test_stream_has_chunks_and_ends_with_one_complete_message() -> None:
    async with serving(says("Hello 🍜.")) as (stub, _):
        call = stub.Generate(asking(max_tokens=20))
        responses = [response async for response in call]
        trailers = dict(await call.trailing_metadata())
    *chunks, last = responses
    assert all(response.HasField("chunk") for response in chunks)
    assert "".join(response.chunk.text for response in chunks) == last.complete.text == "Hello 🍜."
    ids = [token_id for response in chunks for token_id in response.chunk.token_ids]
    assert ids == list(last.complete.output_ids)
    assert embedded_tokenizer().decode(ids) == "Hello 🍜."
    assert last.complete.finish_reason == "stop"
    assert last.complete.matched_token_id == 2
    assert last.complete.completion_tokens == len(ids) == chunks[-1].chunk.completion_tokens
    assert last.complete.prompt_tokens == len(embedded_tokenizer().encode("Hi"))
    assert {response.request_id for response in responses} == {"r1"}
    assert trailers["x-tandem-prefill-worker"] == "prefill-0"
    assert trailers["x-tandem-decode-worker"] == "decode-0"


async def test_only_complete_messages_come_when_not_streaming() -> None:
    async with serving() as (stub, generator):
        request = asking(stream=False, n=3, max_tokens=5, seed=7, logprobs=2)
        responses = [response async for response in stub.Generate(request)]
    assert sorted(response.complete.index for response in responses) == [0, 1, 2]
    assert {response.complete.finish_reason for response in responses} == {"length"}
    assert len({response.complete.text for response in responses}) == 3
    for response in responses:
        assert len(response.complete.logprobs) == 5
        assert len(response.complete.logprobs[0].top_token_ids) == 2
    assert len(generator.requests) == 3


async def test_stop_string_is_matched_and_named() -> None:
    async with serving(says("one two three")) as (stub, _):
        responses = [r async for r in stub.Generate(asking(max_tokens=20, stop=["", " three"]))]
    assert responses[-1].complete.text == "one two"
    assert responses[-1].complete.matched_stop_str == " three"
    assert "".join(r.chunk.text for r in responses) == "one two"


@pytest.mark.parametrize("ids", [[10813, 235], [10813, 235, 229], [229, 138, 40]])
async def test_text_is_always_valid_unicode(ids: list[int]) -> None:
    async with serving(FakeGenerator(script=lambda request: [*ids, 2])) as (stub, _):
        responses = [r async for r in stub.Generate(asking(max_tokens=len(ids)))]
    assert responses[-1].complete.text == embedded_tokenizer().decode(ids)


async def test_token_ids_are_a_prompt_and_every_absent_field_has_its_default() -> None:
    async with serving() as (stub, generator):
        request = pb.GenerateRequest(tokenized=pb.TokenizedInput(input_ids=[5, 6, 7]))
        request.sampling_params.max_tokens = 1
        (response,) = [r async for r in stub.Generate(request)]
    assert response.request_id
    (sequence,) = generator.requests
    assert sequence.prompt_token_ids == (5, 6, 7)
    params = sequence.params
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (1.0, 1.0, 0, 0.0)
    assert (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == (1.0, 0.0, 0.0)
    assert params.logprobs is None
    assert params.stop_token_ids == (2,)
    assert sequence.timeout_s is None


async def test_fields_that_are_given_arrive_even_when_they_are_zero() -> None:
    async with serving() as (stub, generator):
        request = asking(temperature=0, top_p=0.5, max_tokens=0, seed=0, n=2)
        request.cache_salt = "s"
        request.priority = -4
        responses = [r async for r in stub.Generate(request)]
        assert [r.complete.finish_reason for r in responses] == ["length", "length"]
        assert generator.requests == []
        request.sampling_params.max_tokens = 1
        _ = [r async for r in stub.Generate(request, timeout=60)]
    assert generator.requests[0].params.temperature == 0
    assert generator.requests[0].params.seed == 0
    assert (generator.requests[0].cache_salt, generator.requests[0].priority) == ("s", -4)
    assert generator.requests[0].timeout_s is not None
    assert 0 < generator.requests[0].timeout_s < 61


@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        ({"sampling_params": {"temperature": -1}}, grpc.StatusCode.INVALID_ARGUMENT, "temperature"),
        ({"sampling_params": {"n": 0}}, grpc.StatusCode.INVALID_ARGUMENT, "n must be"),
        ({"sampling_params": {"logprobs": 21}}, grpc.StatusCode.INVALID_ARGUMENT, "logprobs"),
        ({"sampling_params": {"max_tokens": 100_000}}, grpc.StatusCode.INVALID_ARGUMENT, "context"),
        ({"tokenized": {"input_ids": [49152]}}, grpc.StatusCode.INVALID_ARGUMENT, "49152"),
        ({"tokenized": {}}, grpc.StatusCode.INVALID_ARGUMENT, "empty"),
        ({"text": ""}, grpc.StatusCode.INVALID_ARGUMENT, "empty"),
        ({"model": "other"}, grpc.StatusCode.NOT_FOUND, "other"),
    ],
)
async def test_bad_request_has_its_status(change: dict[str, Any], code: grpc.StatusCode, words: str) -> None:
    async with serving() as (stub, generator):
        fields = {"text": "Hi"} if not change.keys() & {"text", "tokenized"} else {}
        with pytest.raises(grpc.aio.AioRpcError, match=re.escape(words)) as caught:
            _ = [r async for r in stub.Generate(pb.GenerateRequest(**fields, **change))]
        with pytest.raises(grpc.aio.AioRpcError, match="input is missing"):
            _ = [r async for r in stub.Generate(pb.GenerateRequest())]
    assert caught.value.code() is code
    assert generator.requests == []


@pytest.mark.parametrize(
    ("failure", "code"),
    [
        (QueueFull("full"), grpc.StatusCode.RESOURCE_EXHAUSTED),
        (NoWorker("none"), grpc.StatusCode.UNAVAILABLE),
        (DeadlineExceeded("late"), grpc.StatusCode.DEADLINE_EXCEEDED),
        (WorkerFailed("prefill worker p0: broken"), grpc.StatusCode.INTERNAL),
    ],
)
@pytest.mark.parametrize("fail_after", [0, 2])
async def test_failure_of_generation_has_its_status(failure: Any, code: grpc.StatusCode, fail_after: int) -> None:
    async with serving(FakeGenerator(fail=failure, fail_after=fail_after)) as (stub, generator):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            _ = [r async for r in stub.Generate(asking(max_tokens=9))]
    assert caught.value.code() is code
    assert caught.value.details() == failure.message
    assert generator.closed == ["r1-0"]


@pytest.mark.parametrize("num_messages", [0, 3])
async def test_cancelled_call_closes_its_sequences_and_later_ones_are_served(num_messages: int) -> None:
    async with serving() as (stub, generator):
        for _ in range(20):
            generator.gate = asyncio.Semaphore(num_messages)
            call = stub.Generate(asking(max_tokens=1000))
            for _ in range(num_messages):
                await call.read()
            await generator.started()
            call.cancel()
            async with asyncio.timeout(10):
                while len(generator.closed) < len(generator.requests):
                    await generator.ended()
                    await asyncio.sleep(0)
        generator.gate = None
        responses = [r async for r in stub.Generate(asking(max_tokens=2))]
    assert responses[-1].complete.completion_tokens == 2
    assert generator.stats.num_active == 0


async def test_abort_ends_a_call_by_its_id_once() -> None:
    async with serving() as (stub, generator):
        generator.gate = asyncio.Semaphore(1)
        call = stub.Generate(asking(max_tokens=1000, n=2))
        await call.read()
        answer = await stub.Abort(pb.AbortRequest(request_ids=["r1", "unknown", "r1"]))
        assert await call.code() is grpc.StatusCode.CANCELLED
        again = await stub.Abort(pb.AbortRequest(request_ids=["r1"]))
        assert len(generator.closed) == 2
    assert (answer.num_aborted, again.num_aborted) == (1, 0)


async def test_request_id_in_flight_is_refused() -> None:
    async with serving() as (stub, generator):
        generator.gate = asyncio.Semaphore(0)
        first = stub.Generate(asking(max_tokens=2))
        await generator.started()
        with pytest.raises(grpc.aio.AioRpcError, match="in flight"):
            _ = [r async for r in stub.Generate(asking(max_tokens=2))]
        generator.gate.release()
        generator.gate.release()
        assert len([r async for r in first]) == 3


async def test_deadline_ends_a_call_and_its_sequences() -> None:
    async with serving() as (stub, generator):
        generator.gate = asyncio.Semaphore(0)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            _ = [r async for r in stub.Generate(asking(max_tokens=2), timeout=0.05)]
        async with asyncio.timeout(10):
            while len(generator.closed) < len(generator.requests):
                await generator.ended()
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_model_server_and_loads_are_told() -> None:
    async with serving(FakeGenerator(served_model(max_model_len=99))) as (stub, _):
        model = await stub.GetModelInfo(pb.GetModelInfoRequest())
        server = await stub.GetServerInfo(pb.GetServerInfoRequest())
        loads = await stub.GetLoads(pb.GetLoadsRequest())
    assert (model.served_model_name, model.max_context_length, model.block_size) == ("fake", 99, 16)
    assert list(model.eos_token_ids) == [2]
    assert server.version == "1.2.3"
    assert server.uptime_seconds > 0
    assert [(worker.worker_id, worker.role, worker.ready) for worker in server.workers] == [
        ("prefill-0", "prefill", True),
        ("decode-0", "decode", True),
    ]
    assert loads.loads[1].num_free_blocks == 90
