"""What is hard on a stream: characters of many tokens, messages too large, clients that leave (cases G1 to G3)."""

import asyncio
import os

import grpc
import pytest

from fake_generator import FakeGenerator, served_model
from gateway_api import embedded_tokenizer
from generation_api import Served, asking, check_joined, serving
from tandem.v1 import generation_pb2 as pb

EMOJI = "👩‍🚀🍜🇨🇿🤷🏽‍♀️" * 8
CJK = "東京都渋谷区の天気は晴れです。" * 4
CZECH = "Příliš žluťoučký kůň úpěl ďábelské ódy. " * 3


async def answers(served: Served, request: pb.GenerateRequest) -> list[pb.GenerateResponse]:
    return [response async for response in served.stub.Generate(request)]


@pytest.mark.parametrize("max_tokens", [24, 3])
@pytest.mark.parametrize("text", [EMOJI, CJK, CZECH], ids=["emoji", "cjk", "czech"])
@pytest.mark.parametrize("tokens_per_chunk", [1, 2])
async def test_characters_are_whole_in_every_message(text: str, max_tokens: int, tokens_per_chunk: int) -> None:
    tokenizer = embedded_tokenizer()
    script = tokenizer.encode(text)
    generator = FakeGenerator(script=lambda request: script, tokens_per_chunk=tokens_per_chunk)
    async with serving(generator) as served:
        request = asking(text, max_tokens=max_tokens, n=2)
        responses = await answers(served, request)
        request.stream = False
        unstreamed = await answers(served, request)
    wholes = check_joined(responses)
    assert {r.complete.index: r.complete for r in unstreamed} == wholes
    whole = wholes[0].text
    assert whole == tokenizer.decode(script[:max_tokens])
    # Only the end can be cut short, by max_tokens.
    assert "\ufffd" not in whole.rstrip("\ufffd")
    said = ""
    for response in responses:
        if response.HasField("chunk") and response.chunk.index == 0:
            said += response.chunk.text
            assert whole.startswith(said)


async def test_prompt_of_more_ids_than_any_context_is_an_invalid_argument() -> None:
    async with serving() as served:
        for token_id in (1, 40_000):  # 2.2 and 6.6 million bytes
            request = pb.GenerateRequest(tokenized=pb.TokenizedInput(input_ids=[token_id] * 2_200_000))
            call = served.stub.Generate(request)
            with pytest.raises(grpc.aio.AioRpcError, match="tokenized has 2200000 ids") as caught:
                await call.read()
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert dict(await call.trailing_metadata())["x-request-id"]
        check_joined(await answers(served, asking(max_tokens=2)))
    assert len(served.generator.requests) == 1


async def test_message_beyond_the_servers_limit_is_resource_exhausted() -> None:
    async with serving(max_message_bytes=4 * 2**20) as served:
        request = pb.GenerateRequest(tokenized=pb.TokenizedInput(input_ids=[40_000] * 2_200_000))
        with pytest.raises(grpc.aio.AioRpcError, match="larger than max") as caught:
            await answers(served, request)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        check_joined(await answers(served, asking(max_tokens=2)))
    assert len(served.generator.requests) == 1


async def test_clients_that_leave_in_the_middle_leave_nothing_behind(caplog: pytest.LogCaptureFixture) -> None:
    # More often than any pool of threads here has threads: a handler that hung would take them all.
    num_calls = 2 * (min(32, (os.cpu_count() or 1) + 4) + 1)
    async with serving(FakeGenerator(served_model(max_model_len=100_000))) as served:

        async def leave() -> None:
            call = served.stub.Generate(pb.GenerateRequest(text="Hi", stream=True))
            for _ in range(3):
                assert (await call.read()).HasField("chunk")
            call.cancel()
            assert await call.code() is grpc.StatusCode.CANCELLED

        for _ in range(2):
            await asyncio.gather(*(leave() for _ in range(num_calls // 2)))
        async with asyncio.timeout(10):
            while served.generator.stats.num_active:
                await asyncio.sleep(0)
        assert len(served.generator.closed) == num_calls
        assert served.generator.finished == []
        info = await served.stub.GetServerInfo(pb.GetServerInfoRequest())
        assert info.active_requests == 0
        check_joined(await answers(served, asking(max_tokens=3)))
    assert [record for record in caplog.records if record.levelname in ("ERROR", "CRITICAL")] == []
