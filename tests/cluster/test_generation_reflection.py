"""What grpcurl does, and what docs/grpc.md says: nothing but reflection, JSON in and JSON out."""

import asyncio
import json
from collections.abc import Callable
from typing import Any, TypeVar

import grpc
import pytest
from google.protobuf import json_format

from fake_generator import FakeGenerator
from gateway_api import embedded_tokenizer, says
from generation_api import embedded_template, serving
from grpc_guide import commands, run_program
from reflective_client import ReflectiveClient

GENERATION = "tandem.v1.Generation"
T = TypeVar("T")


async def with_client(address: str, use: Callable[[ReflectiveClient], T]) -> T:
    """In a thread: the client blocks, and the server lives in this loop."""

    def run() -> T:
        with ReflectiveClient(address) as client:
            return use(client)

    return await asyncio.to_thread(run)


async def test_server_tells_its_services_methods_and_messages() -> None:
    def use(client: ReflectiveClient) -> None:
        assert GENERATION in client.services()
        methods = client.describe(GENERATION).methods_by_name
        assert set(methods) == {
            "Generate", "Abort", "Tokenize", "Detokenize", "GetModelInfo", "GetServerInfo", "GetLoads",
        }  # fmt: skip
        assert [name for name, method in methods.items() if method.server_streaming] == ["Generate"]
        request = methods["Generate"].input_type
        assert [field.name for field in request.oneofs_by_name["input"].fields] == ["tokenized", "text", "chat"]
        # Messages of another file, which must be asked for too.
        params = request.fields_by_name["sampling_params"].message_type
        assert params.full_name == "tandem.v1.SamplingParams"
        assert params.fields_by_name["top_k"].has_presence

    async with serving() as served:
        await with_client(served.address, use)


async def test_request_and_responses_are_json() -> None:
    request = {"text": "Hi", "stream": True, "samplingParams": {"maxTokens": 20, "n": 2, "logitBias": {"300": -1.5}}}

    def use(client: ReflectiveClient) -> list[dict[str, Any]]:
        responses = client.call(f"{GENERATION}/Generate", json.dumps(request), headers=[("x-request-id", "curl-1")])
        assert client.trailers["x-request-id"] == "curl-1"
        assert client.trailers["x-tandem-decode-worker"] == "decode-0"
        return responses

    async with serving(says("Hello 🍜.")) as served:
        responses = await with_client(served.address, use)
    text = "".join(r["chunk"].get("text", "") for r in responses if "chunk" in r and not r["chunk"].get("index"))
    wholes = [response["complete"] for response in responses if "complete" in response]
    assert [whole["text"] for whole in wholes] == ["Hello 🍜."] * 2
    assert text == "Hello 🍜."
    assert wholes[0]["output_ids"] == [*embedded_tokenizer().encode("Hello 🍜."), 2]
    assert wholes[0]["finish_reason"] == "stop"
    assert served.generator.requests[0].params.logit_bias == {300: -1.5}
    assert {response["request_id"] for response in responses} == {"curl-1"}


async def test_what_no_message_has_is_an_error_and_a_status_is_told() -> None:
    def use(client: ReflectiveClient) -> None:
        with pytest.raises(json_format.ParseError, match="txet"):
            client.call(f"{GENERATION}/Generate", '{"txet": "Hi"}')
        with pytest.raises(json_format.ParseError):
            client.call(f"{GENERATION}/Generate", '{"sampling_params": {"top_k": -1}}')
        with pytest.raises(grpc.RpcError) as caught:
            client.call(f"{GENERATION}/Generate", '{"text": "Hi", "sampling_params": {"n": 0}}')
        assert isinstance(caught.value, grpc.Call)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "n must be in [1, 128], not 0" in caught.value.details()

    async with serving() as served:
        await with_client(served.address, use)


@pytest.mark.parametrize("command", commands())
async def test_command_of_the_guide_is_answered(command: str) -> None:
    async with serving(FakeGenerator(), template=embedded_template()) as served:
        assert await with_client(served.address, lambda client: client.run(command))


async def test_program_of_the_guide_prints_the_text_and_the_trailers() -> None:
    async with serving(says("Once upon a time."), template=embedded_template()) as served:
        output = await asyncio.to_thread(run_program, served.address)
    assert output.startswith("Once upon a time.\n")
    assert "tokens, stop\n" in output
    assert "x-request-id story-1\n" in output
    assert "x-tandem-decode-worker decode-0\n" in output
