"""gRPC over a whole gateway and real workers: tokens, trailers, limits, and what clients leave behind that leave."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import grpc
import pytest

from cluster.gateway import Gateway
from engine.hash_executor import expected_tokens
from engine.sampling_params import SamplingParams
from generation_api import CHANNEL_OPTIONS, check_joined
from hash_gateway import MODEL, VOCAB_SIZE, running
from reflective_client import ReflectiveClient
from tandem.v1 import generation_pb2 as pb
from tandem.v1 import generation_pb2_grpc, sampling_pb2

PROMPT = list(range(100, 140))
T = TypeVar("T")


@asynccontextmanager
async def stub_of(gateway: Gateway) -> AsyncIterator[Any]:
    address = f"127.0.0.1:{gateway.grpc_port}"
    async with grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
        yield generation_pb2_grpc.GenerationStub(channel)


def asking(*, prompt: list[int] | None = None, stream: bool = True, **params: Any) -> pb.GenerateRequest:
    params = {"max_tokens": 8, "temperature": 0, "ignore_eos": True} | params
    return pb.GenerateRequest(
        tokenized=pb.TokenizedInput(input_ids=PROMPT if prompt is None else prompt),
        stream=stream,
        sampling_params=sampling_pb2.SamplingParams(**params),
    )


def expected(num_tokens: int = 8) -> list[int]:
    return expected_tokens(PROMPT, SamplingParams(max_tokens=num_tokens, temperature=0), VOCAB_SIZE)


async def until_idle(stub: Any) -> None:
    """Until no worker has a request, and no block is in use."""
    async with asyncio.timeout(30):
        while True:
            loads = (await stub.GetLoads(pb.GetLoadsRequest())).loads
            assert {load.worker_id for load in loads} == {"p0", "d0"}
            busy = [load.num_running + load.num_waiting + load.num_transferring for load in loads]
            if not any(busy) and not any(load.num_active_blocks for load in loads):
                return
            await asyncio.sleep(0)


async def test_trailers_tell_the_workers_the_cached_tokens_and_where_the_time_went() -> None:
    async with running() as gateway, stub_of(gateway) as stub:
        for cached in (0, 32):
            call = stub.Generate(asking(n=2), metadata=(("x-request-id", "call-7"),))
            wholes = check_joined([response async for response in call])
            assert [list(whole.output_ids) for whole in wholes.values()] == [expected()] * 2
            trailers = dict(await call.trailing_metadata())
            assert trailers["x-request-id"] == "call-7"
            assert (trailers["x-tandem-prefill-worker"], trailers["x-tandem-decode-worker"]) == ("p0", "d0")
            # The second time, the prompt's two whole blocks of 16 are there.
            assert int(trailers["x-tandem-cached-tokens"]) == cached
            stages = [float(trailers[f"x-tandem-{stage}-ms"]) for stage in ("queued", "prefill", "transfer", "decode")]
            assert all(milliseconds >= 0 for milliseconds in stages)
            assert sum(stages) > 0
            await until_idle(stub)


async def test_reflection_is_all_that_a_client_needs() -> None:
    def use(address: str) -> None:
        with ReflectiveClient(address) as client:
            assert {"tandem.v1.Generation", "grpc.health.v1.Health"} <= set(client.services())
            (health,) = client.call("grpc.health.v1.Health/Check", '{"service": "tandem.v1.Generation"}')
            assert health == {"status": "SERVING"}
            (info,) = client.call("tandem.v1.Generation/GetModelInfo")
            assert (info["served_model_name"], info["has_chat_template"]) == (MODEL, True)
            responses = client.call(
                "tandem.v1.Generation/Generate",
                f'{{"tokenized": {{"input_ids": {PROMPT}}}, "stream": true,'
                ' "sampling_params": {"max_tokens": 8, "temperature": 0, "ignore_eos": true}}',
            )
            ids = [i for response in responses if "chunk" in response for i in response["chunk"]["token_ids"]]
            assert ids == responses[-1]["complete"]["output_ids"] == expected()
            # The model is told to have 1,000 tokens; the first of them are bytes.
            (text,) = client.call("tandem.v1.Generation/Detokenize", f'{{"tokens": {expected()}}}')
            assert text["text"]

    async with running() as gateway:
        await asyncio.to_thread(use, f"127.0.0.1:{gateway.grpc_port}")


async def test_key_is_wanted_for_every_call_and_a_refusal_has_its_id() -> None:
    async with running(api_key=["sesame"]) as gateway, stub_of(gateway) as stub:
        for key in (None, "open"):
            metadata = [("x-request-id", "call-7"), *([("authorization", f"Bearer {key}")] if key else [])]
            for call in (
                stub.Generate(asking(), metadata=metadata),
                stub.Tokenize(pb.TokenizeRequest(text="Hi"), metadata=metadata),
                stub.Abort(pb.AbortRequest(request_ids=["call-8"]), metadata=metadata),
            ):
                assert await call.code() is grpc.StatusCode.UNAUTHENTICATED
                assert dict(await call.trailing_metadata()) == {"x-request-id": "call-7"}
        call = stub.Generate(asking(), metadata=[("authorization", "Bearer sesame")])
        assert list(check_joined([response async for response in call])[0].output_ids) == expected()
        assert gateway.generator.stats.num_active == 0


async def test_prompt_of_more_ids_than_any_context_is_refused_and_others_are_served() -> None:
    async with running() as gateway, stub_of(gateway) as stub:
        for token_id in (1, 2**32 - 1):  # 2.2 and 11 million bytes: what a message may have at most is between them
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                _ = [r async for r in stub.Generate(asking(prompt=[token_id] * 2_200_000))]
            assert caught.value.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED)
        wholes = check_joined([response async for response in stub.Generate(asking())])
        assert list(wholes[0].output_ids) == expected()
        await until_idle(stub)


async def leave(stub: Any) -> None:
    call = stub.Generate(asking(max_tokens=200))
    for _ in range(3):
        assert (await call.read()).HasField("chunk")
    call.cancel()
    assert await call.code() is grpc.StatusCode.CANCELLED


async def let_time_pass(stub: Any) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        _ = [response async for response in stub.Generate(asking(max_tokens=200, n=4), timeout=0.05)]
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


@pytest.mark.parametrize("go", [leave, let_time_pass])
async def test_blocks_of_clients_that_leave_return_and_later_calls_are_served(go: Callable[[Any], Any]) -> None:
    # More often than any pool of threads here has threads: a handler that hung would take them all.
    num_calls = 2 * (min(32, (os.cpu_count() or 1) + 4) + 1)
    # Room for two at once: the others wait, and leave while they do or soon after.
    async with running(num_blocks=40) as gateway, stub_of(gateway) as stub:
        await asyncio.gather(*(go(stub) for _ in range(num_calls)))
        await until_idle(stub)
        assert gateway.generator.stats.num_active == 0
        for _ in range(3):
            wholes = check_joined([response async for response in stub.Generate(asking(max_tokens=200))])
            assert list(wholes[0].output_ids) == expected(200)
        await until_idle(stub)


async def test_abort_of_a_stream_gives_its_blocks_back() -> None:
    async with running() as gateway, stub_of(gateway) as stub:
        num_aborted = 0
        while not num_aborted:  # unless a stream has ended before the abort came
            call = stub.Generate(asking(max_tokens=200, n=2), metadata=(("x-request-id", "call-7"),))
            responses = aiter(call)
            assert (await anext(responses)).request_id == "call-7"
            num_aborted = (await stub.Abort(pb.AbortRequest(request_ids=["call-7"]))).num_aborted
        with pytest.raises(grpc.aio.AioRpcError, match="call-7 was aborted") as caught:
            _ = [response async for response in responses]
        assert caught.value.code() is grpc.StatusCode.CANCELLED
        assert dict(await call.trailing_metadata())["x-request-id"] == "call-7"
        await until_idle(stub)
