"""Sampling parameters as clients of gRPC give them: what absent means, what zero means, what is refused."""

import json
import math
from dataclasses import replace
from typing import Any

import grpc
import pytest

from cluster.errors import InvalidRequest
from cluster.generation.options import text_options
from cluster.generation.prompt import Prompt
from cluster.generator import SequenceRequest
from cluster.text_request import TextOptions
from engine.structure.spec import Structure, StructureKind
from gateway_api import Api
from generation_api import asking, serving
from tandem.v1 import generation_pb2 as pb
from tandem.v1 import sampling_pb2

PROMPT = Prompt("Hi", "text", add_special_tokens=True)


def options(**params: Any) -> TextOptions:
    return text_options(pb.GenerateRequest(sampling_params=sampling_pb2.SamplingParams(**params)), PROMPT, None)


def test_absent_fields_are_the_defaults_of_http() -> None:
    assert options() == TextOptions()
    assert text_options(pb.GenerateRequest(), PROMPT, None) == TextOptions()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 0),
        ("max_tokens", 0),
        ("min_tokens", 0),
        ("temperature", 0.0),
        ("top_p", 0.0),
        ("top_k", 0),
        ("min_p", 0.0),
        ("repetition_penalty", 0.0),
        ("presence_penalty", 0.0),
        ("frequency_penalty", 0.0),
        ("seed", 0),
        ("logprobs", 0),
        ("prompt_logprobs", 0),
        ("ignore_eos", False),
        ("skip_special_tokens", False),
        ("include_stop_str_in_output", False),
    ],
)
def test_zero_is_zero_and_not_absent(name: str, value: float) -> None:
    assert getattr(options(**{name: value}), name) == value


def test_every_field_of_the_message_is_an_option() -> None:
    given = {
        "n": 3,
        "max_tokens": 7,
        "min_tokens": 2,
        "temperature": 0.5,
        "top_p": 0.25,
        "top_k": 9,
        "min_p": 0.125,
        "repetition_penalty": 1.5,
        "presence_penalty": -2.0,
        "frequency_penalty": 2.0,
        "logit_bias": {5: -100.0},
        "seed": -(2**63),
        "logprobs": 4,
        "prompt_logprobs": 6,
        "stop": ["", "a", "b"],
        "stop_token_ids": [0, 11],
        "ignore_eos": True,
        "skip_special_tokens": False,
        "include_stop_str_in_output": True,
    }
    fields = {field.name for field in sampling_pb2.SamplingParams.DESCRIPTOR.fields}
    assert fields - {"structure"} == set(given)
    request = pb.GenerateRequest(
        sampling_params=sampling_pb2.SamplingParams(**given), cache_salt="s", priority=-(2**31)
    )
    expected = given | {"stop": ("a", "b"), "stop_token_ids": (0, 11), "cache_salt": "s", "priority": -(2**31)}
    assert text_options(request, PROMPT, 1.5) == TextOptions(**expected, timeout_s=1.5)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("structure", "expected"),
    [
        ({}, None),
        ({"json_object": False}, None),
        ({"json_object": True}, Structure(StructureKind.JSON_OBJECT)),
        ({"json_schema": '{"b":1,"a":2}'}, Structure(StructureKind.JSON_SCHEMA, '{"b":1,"a":2}')),
        ({"json_schema": "{}", "strict": True}, Structure(StructureKind.JSON_SCHEMA, "{}", strict=True)),
        ({"regex": "[ab]+"}, Structure(StructureKind.REGEX, "[ab]+")),
        ({"grammar": 'start: "a"'}, Structure(StructureKind.GRAMMAR, 'start: "a"')),
    ],
)
def test_structure_is_what_the_text_is_held_to(structure: dict[str, Any], expected: Structure | None) -> None:
    assert options(structure=sampling_pb2.StructuredOutput(**structure)).structure == expected


def test_choice_is_an_array_of_strings_and_has_at_least_one() -> None:
    strings = ["ja", 'n"ein', "", "🍜"]
    choice = sampling_pb2.StringChoice(strings=strings)
    structure = options(structure=sampling_pb2.StructuredOutput(choice=choice)).structure
    assert structure is not None
    assert structure.kind is StructureKind.CHOICE
    assert json.loads(structure.text) == strings
    with pytest.raises(InvalidRequest, match="at least one string") as caught:
        options(structure=sampling_pb2.StructuredOutput(choice=sampling_pb2.StringChoice()))
    assert caught.value.param == "structure"


@pytest.mark.parametrize(
    ("params", "name"),
    [
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"max_tokens": 2**32 - 1}, "context"),
        ({"max_tokens": 3, "min_tokens": 4}, "min_tokens"),
        ({"temperature": -0.5}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": math.inf}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_p": -0.5}, "top_p"),
        ({"top_p": math.nan}, "top_p"),
        ({"top_k": 2**31}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"repetition_penalty": -1}, "repetition_penalty"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"frequency_penalty": -2.5}, "frequency_penalty"),
        ({"logit_bias": {5: 101}}, "logit_bias"),
        ({"logit_bias": {5: math.nan}}, "logit_bias"),
        ({"logit_bias": {49152: 1}}, "logit_bias"),
        ({"logprobs": 21}, "logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": ["x" * 1025]}, "stop"),
        ({"stop_token_ids": [49152]}, "stop_token_ids"),
        ({"stop_token_ids": [2**32 - 1]}, "stop_token_ids"),
        ({"structure": {"choice": {}}}, "structure.choice"),
        ({"structure": {"json_schema": "{"}}, "structure.json_schema"),
        ({"structure": {"json_schema": "true"}}, "structure.json_schema"),
        ({"structure": {"json_object": True}, "ignore_eos": True}, "ignore_eos"),
    ],
)
async def test_value_out_of_range_is_an_invalid_argument_that_names_the_field(
    params: dict[str, Any], name: str
) -> None:
    async with serving() as served:
        with pytest.raises(grpc.aio.AioRpcError, match=name) as caught:
            _ = [response async for response in served.stub.Generate(asking(**params))]
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert served.generator.requests == []


@pytest.mark.parametrize(
    ("http", "params"),
    [
        ({}, {}),
        (
            {
                "n": 3, "max_tokens": 7, "min_tokens": 2, "temperature": 0.5, "top_p": 0.25, "top_k": 9, "min_p": 0.125,
                "repetition_penalty": 1.5, "presence_penalty": -2, "frequency_penalty": 2, "logit_bias": {"5": -100},
                "seed": -7, "logprobs": 4, "prompt_logprobs": 3, "stop": ["a", ""], "stop_token_ids": [0, 11],
                "include_stop_str_in_output": True, "skip_special_tokens": False,
            },
            None,
        ),
        ({"max_tokens": 3, "temperature": 0, "ignore_eos": True}, None),
        ({"guided_regex": "[ab]+"}, {"structure": {"regex": "[ab]+"}}),
        ({"guided_choice": ["a", "č"]}, {"structure": {"choice": {"strings": ["a", "č"]}}}),
        ({"response_format": {"type": "json_object"}}, {"structure": {"json_object": True}}),
    ],
    ids=["nothing", "everything", "greedy", "regex", "choice", "json"],
)  # fmt: skip
async def test_sequences_are_those_of_http(http: dict[str, Any], params: dict[str, Any] | None) -> None:
    """`params` None: as over HTTP."""
    http = {"max_tokens": 2, "seed": 1} | http
    wire = {"max_tokens": 2, "seed": 1} | (http if params is None else params)
    if "logit_bias" in wire:
        wire["logit_bias"] = {int(token_id): bias for token_id, bias in wire["logit_bias"].items()}
    api = Api()
    reply = await api.complete("Hi", cache_salt="s", priority=-3, **http)
    assert reply.status_code == 200, reply.text
    async with serving() as served:
        request = pb.GenerateRequest(text="Hi", cache_salt="s", priority=-3)
        request.sampling_params.CopyFrom(sampling_pb2.SamplingParams(**wire))
        _ = [response async for response in served.stub.Generate(request)]

    def nameless(requests: list[SequenceRequest]) -> list[SequenceRequest]:
        return sorted((replace(request, request_id="") for request in requests), key=lambda r: r.params.seed)

    assert nameless(served.generator.requests) == nameless(api.generator.requests)
