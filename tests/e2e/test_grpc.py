"""gRPC over real workers and the real model: the guide's examples, structures, tools, text that is hard to cut."""

import json
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from gateway_thread import Endpoint
from generation_api import CHANNEL_OPTIONS, check_joined
from grpc_guide import commands, run_program
from reflective_client import ReflectiveClient
from tandem.v1 import generation_pb2 as pb
from tandem.v1 import generation_pb2_grpc, sampling_pb2

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

EMOJI = "👩‍🚀🍜🇨🇿🤷🏽‍♀️" * 8
CJK = "東京都渋谷区の天気は晴れです。" * 4
CZECH = "Příliš žluťoučký kůň úpěl ďábelské ódy. " * 3
WEATHER = pb.Tool(
    name="weather",
    parameters='{"type": "object", "properties": {"city": {"type": "string", "maxLength": 12}}, "required": ["city"]}',
)


@pytest.fixture
def stub(endpoint: Endpoint) -> Iterator[Any]:
    with grpc.insecure_channel(endpoint.grpc_address, options=CHANNEL_OPTIONS) as channel:
        yield generation_pb2_grpc.GenerationStub(channel)


def asking(text: str, *, stream: bool = True, **params: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(text=text, stream=stream, sampling_params=sampling_pb2.SamplingParams(**params))


def whole_of(stub: Any, request: pb.GenerateRequest) -> pb.GenerateComplete:
    """What is streamed, which must be what is not."""
    request.stream = True
    streamed = check_joined(stub.Generate(request, timeout=60))
    request.stream = False
    (response,) = stub.Generate(request, timeout=60)
    whole: pb.GenerateComplete = response.complete
    for found in (streamed[0], whole):
        for call in found.tool_calls:
            call.id = ""  # made anew each time
        found.cached_tokens = 0
    assert streamed == {0: whole}
    return whole


@pytest.mark.parametrize("command", commands())
def test_command_of_the_guide_is_answered(endpoint: Endpoint, command: str) -> None:
    with ReflectiveClient(endpoint.grpc_address) as client:
        assert client.run(command)


def test_program_of_the_guide_tells_a_story(endpoint: Endpoint) -> None:
    output = run_program(endpoint.grpc_address)
    assert "16 tokens, length\n" in output
    assert "x-tandem-decode-ms " in output


@pytest.mark.parametrize("max_tokens", [24, 3])
@pytest.mark.parametrize("text", [EMOJI, CJK, CZECH], ids=["emoji", "cjk", "czech"])
def test_characters_are_whole(stub: Any, text: str, max_tokens: int) -> None:
    whole = whole_of(stub, asking(text, max_tokens=max_tokens, temperature=0, ignore_eos=True))
    assert whole.completion_tokens == max_tokens
    assert "\ufffd" not in whole.text.rstrip("\ufffd")


def test_text_is_held_to_its_structure(stub: Any) -> None:
    choice = sampling_pb2.StructuredOutput(choice=sampling_pb2.StringChoice(strings=["mošt", "víno"]))
    assert whole_of(stub, asking("Drink: ", max_tokens=20, temperature=0, structure=choice)).text in ("mošt", "víno")
    schema = '{"type": "object", "properties": {"n": {"type": "integer", "maximum": 99}}, "required": ["n"]}'
    structure = sampling_pb2.StructuredOutput(json_schema=schema)
    whole = whole_of(stub, asking("A number: ", max_tokens=60, temperature=0, structure=structure))
    assert json.loads(whole.text)["n"] <= 99


@pytest.mark.parametrize(
    "structure", [{"regex": "("}, {"grammar": "start: nothing"}, {"json_schema": '{"type": "nonsense"}'}]
)
def test_structure_that_is_none_is_an_invalid_argument(stub: Any, structure: dict[str, Any]) -> None:
    request = asking("Hi", max_tokens=4, structure=sampling_pb2.StructuredOutput(**structure))
    call = stub.Generate(request, timeout=60, metadata=[("x-request-id", "bad-1")])
    with pytest.raises(grpc.RpcError) as caught:
        list(call)
    assert isinstance(caught.value, grpc.Call)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.details().startswith(f"structure.{next(iter(structure))} cannot be used: ")
    assert dict(call.trailing_metadata())["x-request-id"] == "bad-1"


def test_function_that_is_named_is_called(stub: Any) -> None:
    request = asking("", max_tokens=60, temperature=0)
    request.chat.CopyFrom(
        pb.ChatInput(
            messages=[pb.ChatMessage(role="user", content="Will it rain in Brno?")],
            tools=[WEATHER],
            tool_choice=pb.ToolChoice(function="weather"),
        )
    )
    (call,) = whole_of(stub, request).tool_calls
    assert call.name == "weather"
    assert set(json.loads(call.arguments)) >= {"city"}


def test_prompt_has_its_log_probabilities(stub: Any) -> None:
    request = asking("The capital of France is", max_tokens=2, temperature=0, logprobs=1, prompt_logprobs=1)
    request.return_prompt_token_ids = True
    whole = whole_of(stub, request)
    told = whole.prompt_logprobs
    assert len(told.logprobs) == len(told.top_token_ids) == len(whole.prompt_token_ids) - 1
    assert all(top >= logprob - 1e-6 for top, logprob in zip(told.top_logprobs, told.logprobs, strict=True))
    # As a prompt or generated: the same token after the same tokens.
    longer = pb.GenerateRequest(sampling_params=request.sampling_params)
    longer.tokenized.input_ids.extend([*whole.prompt_token_ids, *whole.output_ids])
    again = whole_of(stub, longer).prompt_logprobs.logprobs[-2:]
    assert again == pytest.approx([token.logprob for token in whole.logprobs], abs=1e-3)
