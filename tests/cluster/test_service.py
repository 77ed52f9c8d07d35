"""The Generation service over real gRPC, on a fake generator."""

import asyncio
import re
from typing import Any

import grpc
import pytest

from cluster.errors import DeadlineExceeded, NoWorker, QueueFull, WorkerFailed
from cluster.grpc_handlers import Continuation, Handler, behaviour_of, with_behaviour
from fake_generator import FakeGenerator, served_model
from gateway_api import embedded_tokenizer, says
from generation_api import asking, check_joined, serving
from tandem.v1 import generation_pb2 as pb


async def test_stream_has_chunks_and_ends_with_one_complete_message() -> None:
    async with serving(says("Hello 🍜.")) as served:
        call = served.stub.Generate(asking(max_tokens=20))
        responses = [response async for response in call]
        trailers = dict(await call.trailing_metadata())
    *chunks, last = responses
    assert all(response.HasField("chunk") for response in chunks)
    assert check_joined(responses)[0].text == last.complete.text == "Hello 🍜."
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
    async with serving() as served:
        request = asking(stream=False, n=3, max_tokens=5, seed=7, logprobs=2)
        responses = [response async for response in served.stub.Generate(request)]
    assert sorted(response.complete.index for response in responses) == [0, 1, 2]
    assert {response.complete.finish_reason for response in responses} == {"length"}
    assert len({response.complete.text for response in responses}) == 3
    for response in responses:
        assert len(response.complete.logprobs) == 5
        assert len(response.complete.logprobs[0].top_token_ids) == 2
    assert len(served.generator.requests) == 3


@pytest.mark.parametrize("max_tokens", [0, 3])
async def test_log_probabilities_of_the_prompt_come_once_with_streaming_and_without(max_tokens: int) -> None:
    async with serving() as served:
        request = asking("one two three", n=2, max_tokens=max_tokens, prompt_logprobs=2)
        request.return_prompt_token_ids = True
        wholes = check_joined([response async for response in served.stub.Generate(request)])
        request.stream = False
        unstreamed = [response.complete async for response in served.stub.Generate(request)]
    ids = embedded_tokenizer().encode("one two three")
    assert list(wholes[0].prompt_token_ids) == ids
    assert len(wholes[0].prompt_logprobs.logprobs) == len(ids) - 1
    assert len(wholes[0].prompt_logprobs.top_token_ids) == 2 * (len(ids) - 1)
    assert [whole.completion_tokens for whole in wholes.values()] == [max_tokens, max_tokens]
    assert not wholes[1].HasField("prompt_logprobs")
    assert {complete.index: complete.prompt_logprobs for complete in unstreamed} == {
        index: whole.prompt_logprobs for index, whole in wholes.items()
    }


async def test_stop_string_is_matched_and_named() -> None:
    async with serving(says("one two three")) as served:
        responses = [r async for r in served.stub.Generate(asking(max_tokens=20, stop=["", " three"]))]
    assert responses[-1].complete.text == "one two"
    assert responses[-1].complete.matched_stop_str == " three"
    assert "".join(r.chunk.text for r in responses) == "one two"


@pytest.mark.parametrize("ids", [[10813, 235], [10813, 235, 229], [229, 138, 40]])
async def test_text_is_always_valid_unicode(ids: list[int]) -> None:
    async with serving(FakeGenerator(script=lambda request: [*ids, 2])) as served:
        responses = [r async for r in served.stub.Generate(asking(max_tokens=len(ids)))]
    assert responses[-1].complete.text == embedded_tokenizer().decode(ids)


async def test_token_ids_are_a_prompt_and_every_absent_field_has_its_default() -> None:
    async with serving() as served:
        request = pb.GenerateRequest(tokenized=pb.TokenizedInput(input_ids=[5, 6, 7]))
        request.sampling_params.max_tokens = 1
        (response,) = [r async for r in served.stub.Generate(request)]
    assert response.request_id
    (sequence,) = served.generator.requests
    assert sequence.prompt_token_ids == (5, 6, 7)
    params = sequence.params
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (1.0, 1.0, 0, 0.0)
    assert (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == (1.0, 0.0, 0.0)
    assert params.logprobs is None
    assert params.stop_token_ids == (2,)
    assert sequence.timeout_s is None


async def test_fields_that_are_given_arrive_even_when_they_are_zero() -> None:
    async with serving() as served:
        request = asking(temperature=0, top_p=0.5, max_tokens=0, seed=0, n=2)
        request.cache_salt = "s"
        request.priority = -4
        responses = [r async for r in served.stub.Generate(request)]
        assert [r.complete.finish_reason for r in responses] == ["length", "length"]
        assert served.generator.requests == []
        request.sampling_params.max_tokens = 1
        _ = [r async for r in served.stub.Generate(request, timeout=60)]
    assert served.generator.requests[0].params.temperature == 0
    assert served.generator.requests[0].params.seed == 0
    assert (served.generator.requests[0].cache_salt, served.generator.requests[0].priority) == ("s", -4)
    assert served.generator.requests[0].timeout_s is not None
    assert 0 < served.generator.requests[0].timeout_s < 61


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
    async with serving() as served:
        fields = {"text": "Hi"} if not change.keys() & {"text", "tokenized"} else {}
        with pytest.raises(grpc.aio.AioRpcError, match=re.escape(words)) as caught:
            _ = [r async for r in served.stub.Generate(pb.GenerateRequest(**fields, **change))]
        with pytest.raises(grpc.aio.AioRpcError, match="input is missing"):
            _ = [r async for r in served.stub.Generate(pb.GenerateRequest())]
    assert caught.value.code() is code
    assert served.generator.requests == []


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
    async with serving(FakeGenerator(fail=failure, fail_after=fail_after)) as served:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            _ = [r async for r in served.stub.Generate(asking(max_tokens=9))]
    assert caught.value.code() is code
    assert caught.value.details() == failure.message
    assert served.generator.closed == ["r1-0"]


@pytest.mark.parametrize("num_messages", [0, 3])
async def test_cancelled_call_closes_its_sequences_and_later_ones_are_served(num_messages: int) -> None:
    async with serving() as served:
        for _ in range(20):
            served.generator.gate = asyncio.Semaphore(num_messages)
            call = served.stub.Generate(asking(max_tokens=1000))
            for _ in range(num_messages):
                await call.read()
            await served.generator.started()
            call.cancel()
            async with asyncio.timeout(10):
                while len(served.generator.closed) < len(served.generator.requests):
                    await served.generator.ended()
                    await asyncio.sleep(0)
        served.generator.gate = None
        responses = [r async for r in served.stub.Generate(asking(max_tokens=2))]
    assert responses[-1].complete.completion_tokens == 2
    assert served.generator.stats.num_active == 0


async def test_abort_ends_a_call_by_its_id_once() -> None:
    async with serving() as served:
        served.generator.gate = asyncio.Semaphore(1)
        call = served.stub.Generate(asking(max_tokens=1000, n=2))
        await call.read()
        answer = await served.stub.Abort(pb.AbortRequest(request_ids=["r1", "unknown", "r1"]))
        assert await call.code() is grpc.StatusCode.CANCELLED
        again = await served.stub.Abort(pb.AbortRequest(request_ids=["r1"]))
        assert len(served.generator.closed) == 2
    assert (answer.num_aborted, again.num_aborted) == (1, 0)


async def test_request_id_in_flight_is_refused() -> None:
    async with serving() as served:
        served.generator.gate = asyncio.Semaphore(0)
        first = served.stub.Generate(asking(max_tokens=2))
        await served.generator.started()
        with pytest.raises(grpc.aio.AioRpcError, match="in flight"):
            _ = [r async for r in served.stub.Generate(asking(max_tokens=2))]
        served.generator.gate.release()
        served.generator.gate.release()
        assert len([r async for r in first]) == 3


async def test_deadline_ends_a_call_and_its_sequences() -> None:
    async with serving() as served:
        served.generator.gate = asyncio.Semaphore(0)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            _ = [r async for r in served.stub.Generate(asking(max_tokens=2), timeout=0.05)]
        async with asyncio.timeout(10):
            while len(served.generator.closed) < len(served.generator.requests):
                await served.generator.ended()
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


class OutOfTime(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """The server comes to a call when its deadline has passed, before gRPC has cancelled it."""

    class Context:
        def __init__(self, context: Any) -> None:
            self._context = context

        def __getattr__(self, name: str) -> Any:
            return getattr(self._context, name)

        def time_remaining(self) -> float:
            return 0.0

    async def intercept_service(self, continuation: Continuation, handler_call_details: Any) -> Handler:
        handler = await continuation(handler_call_details)
        behaviour = behaviour_of(handler)

        async def late(request: Any, context: Any) -> Any:
            return await behaviour(request, self.Context(context))  # type: ignore[arg-type]

        return with_behaviour(handler, late, handler.request_deserializer)


async def test_call_whose_deadline_passed_before_it_began_is_not_called_invalid() -> None:
    async with serving(interceptors=[OutOfTime()]) as served:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            _ = [r async for r in served.stub.Generate(asking(max_tokens=2))]
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert served.generator.requests == []


async def test_model_server_and_loads_are_told() -> None:
    async with serving(FakeGenerator(served_model(max_model_len=99))) as served:
        model = await served.stub.GetModelInfo(pb.GetModelInfoRequest())
        server = await served.stub.GetServerInfo(pb.GetServerInfoRequest())
        loads = await served.stub.GetLoads(pb.GetLoadsRequest())
    assert (model.served_model_name, model.max_context_length, model.block_size) == ("fake", 99, 16)
    assert list(model.eos_token_ids) == [2]
    assert server.version == "1.2.3"
    assert server.uptime_seconds > 0
    assert [(worker.worker_id, worker.role, worker.ready) for worker in server.workers] == [
        ("prefill-0", "prefill", True),
        ("decode-0", "decode", True),
    ]
    assert loads.loads[1].num_free_blocks == 90


async def test_call_is_known_by_its_metadata_its_message_or_a_name_made_up() -> None:
    async with serving() as served:

        async def names(request_id: str, *metadata: tuple[str, str]) -> tuple[str, str]:
            request = asking(max_tokens=1, stream=False)
            request.request_id = request_id
            call = served.stub.Generate(request, metadata=metadata)
            response = await call.read()
            return response.request_id, dict(await call.trailing_metadata())["x-request-id"]

        assert await names("", ("x-request-id", "call-7")) == ("call-7", "call-7")
        assert await names("mine", ("x-request-id", "call-7")) == ("mine", "call-7")
        assert await names("mine") == ("mine", "mine")
        for metadata in ([], [("x-request-id", "not sound")], [("x-request-id", "x" * 129)]):
            request_id, call_id = await names("", *metadata)
            assert request_id == call_id
            assert re.fullmatch(r"[0-9a-f]{32}", request_id)


async def test_call_that_a_proxy_tries_again_runs_beside_the_first() -> None:
    async with serving() as served:
        served.generator.gate = asyncio.Semaphore(0)
        metadata = (("x-request-id", "call-7"),)
        request = asking(max_tokens=1, stream=False)
        request.request_id = ""
        calls = [served.stub.Generate(request, metadata=metadata) for _ in range(2)]
        async with asyncio.timeout(10):
            while len(served.generator.requests) < 2:
                await asyncio.sleep(0)
        for _ in calls:
            served.generator.gate.release()
        ids = {(await call.read()).request_id for call in calls}
    assert "call-7" in ids
    assert len(ids) == 2


async def test_request_id_that_is_none_is_refused() -> None:
    async with serving() as served:
        request = asking(max_tokens=1)
        request.request_id = "🍜"
        with pytest.raises(grpc.aio.AioRpcError, match="request_id") as caught:
            _ = [r async for r in served.stub.Generate(request)]
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_error_has_trailers_and_says_when_to_come_again() -> None:
    full = QueueFull("full", retry_after_s=1.5)
    async with serving(FakeGenerator(fail=full, fail_after=2)) as served:
        call = served.stub.Generate(asking(max_tokens=9), metadata=(("x-request-id", "call-7"),))
        with pytest.raises(grpc.aio.AioRpcError):
            _ = [r async for r in call]
        trailers = dict(await call.trailing_metadata())
        assert trailers["x-request-id"] == "call-7"
        assert (trailers["x-tandem-prefill-worker"], trailers["x-tandem-decode-worker"]) == ("prefill-0", "decode-0")
        assert (trailers["retry-after-ms"], trailers["grpc-retry-pushback-ms"]) == ("1500", "1500")

        unknown = asking(max_tokens=9)
        unknown.model = "🍜" * 100_000
        call = served.stub.Generate(unknown)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            _ = [r async for r in call]
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        assert dict(await call.trailing_metadata()) == {"x-request-id": "r1"}


async def test_fault_of_ours_is_an_internal_error_without_its_words(caplog: pytest.LogCaptureFixture) -> None:
    async with serving(FakeGenerator(fail=RuntimeError("secret"), fail_after=1)) as served:
        call = served.stub.Generate(asking(max_tokens=9))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            _ = [r async for r in call]
        assert caught.value.code() is grpc.StatusCode.INTERNAL
        assert caught.value.details() == "internal error"
        assert dict(await call.trailing_metadata())["x-request-id"] == "r1"
        assert len(served.generator.closed) == 1
    (record,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert record.exc_info is not None
    assert "secret" in str(record.exc_info[1])
