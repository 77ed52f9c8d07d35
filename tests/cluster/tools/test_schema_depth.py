"""Schemas that are nested too deeply: refused by the field's name at both doors, however the request wants them."""

import json
from typing import Any

import grpc
import pytest

from cluster.errors import InvalidRequest
from cluster.tools.schema_depth import MAX_DEPTH, check_depth
from gateway_api import Api, error_of
from generation_api import asking, chatting, embedded_template, serving
from tandem.v1 import generation_pb2 as pb

ANSWER = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object", "properties": {}}}}


def nested(depth: int) -> dict[str, Any]:
    """A schema of `depth` objects and arrays within each other."""
    schema: dict[str, Any] = {"type": "string"}
    for level in range(1, depth):
        match level % 3:
            case 0:
                schema = {"items": schema}
            case 1:
                schema = {"city": schema}
            case 2:
                schema = {"type": "object", "properties": schema}
    return {"type": "object"} | schema


def tool(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": schema}}


DEEP = nested(MAX_DEPTH + 1)
DEEP_TOOLS = [tool({"type": "object"}), {"type": "function", "function": {"name": "deep", "parameters": DEEP}}]
WHERE = "tools[1].function.parameters"


@pytest.mark.parametrize("schema", [{}, nested(MAX_DEPTH), {"enum": [[]] * 1000}])
def test_schema_within_the_bound_is_let_through(schema: dict[str, Any]) -> None:
    check_depth(schema, "schema")


@pytest.mark.parametrize("depth", [MAX_DEPTH + 1, 200, 490, 100_000])
def test_schema_beyond_the_bound_is_refused(depth: int) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_depth(nested(depth), "schema")
    assert caught.value.param == "schema"
    assert str(MAX_DEPTH) in caught.value.message


def test_arrays_count_too() -> None:
    value: list[Any] = []
    for _ in range(MAX_DEPTH - 1):
        value = [value]
    with pytest.raises(InvalidRequest):
        check_depth({"enum": value}, "schema")


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"tool_choice": "required"},
        {"tool_choice": {"type": "function", "function": {"name": "deep"}}},
        {"response_format": ANSWER},
    ],
    ids=["auto", "required", "named", "with an answer's format"],
)
@pytest.mark.parametrize("depth", [MAX_DEPTH + 1, 200, 490])
async def test_tool_is_named_over_http(fields: dict[str, Any], depth: int) -> None:
    api = Api()
    tools = [DEEP_TOOLS[0], {"type": "function", "function": {"name": "deep", "parameters": nested(depth)}}]
    error = error_of(await api.chat(tools=tools, **fields), 400)
    assert error["param"] == WHERE
    assert WHERE in error["message"]
    assert api.generator.requests == []


async def test_tool_at_the_bound_is_served_in_every_way() -> None:
    api = Api()
    tools = [tool(nested(MAX_DEPTH))]
    for fields in ({}, {"tool_choice": "required"}, {"response_format": ANSWER}):
        reply = await api.chat(tools=tools, max_tokens=1, **fields)
        assert reply.status_code == 200, reply.text


async def test_tokens_of_such_tools_are_not_counted() -> None:
    body = {"model": "fake", "messages": [{"role": "user", "content": "Hi"}], "tools": DEEP_TOOLS}
    assert error_of(await Api().post("/tokenize", body), 400)["param"] == WHERE


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": DEEP}}},
            "response_format.json_schema.schema",
        ),
        ({"guided_json": DEEP}, "guided_json"),
        ({"guided_json": json.dumps(DEEP)}, "guided_json"),
        ({"structured_outputs": {"json": nested(490)}}, "structured_outputs.json"),
    ],
)
@pytest.mark.parametrize("tools", [None, [tool({})]], ids=["alone", "with tools"])
async def test_answers_format_is_named_over_http(fields: dict[str, Any], param: str, tools: Any) -> None:
    api = Api()
    assert error_of(await api.chat(tools=tools, **fields), 400)["param"] == param
    assert api.generator.requests == []


@pytest.mark.parametrize("choice", [None, pb.ToolChoice(mode="required"), pb.ToolChoice(function="deep")])
@pytest.mark.parametrize("depth", [MAX_DEPTH + 1, 200, 490])
async def test_tool_is_named_over_grpc(choice: pb.ToolChoice | None, depth: int) -> None:
    tools = [pb.Tool(name="f", parameters="{}"), pb.Tool(name="deep", parameters=json.dumps(nested(depth)))]
    await _check_refused(chatting(tools=tools, tool_choice=choice), WHERE)


@pytest.mark.parametrize("depth", [MAX_DEPTH + 1, 490])
async def test_texts_structure_is_named_over_grpc(depth: int) -> None:
    alone, with_tools = asking(), chatting(tools=[pb.Tool(name="f")])
    for request in (alone, with_tools):
        request.sampling_params.structure.json_schema = json.dumps(nested(depth))
        await _check_refused(request, "structure.json_schema")


async def _check_refused(request: pb.GenerateRequest, words: str) -> None:
    async with serving(template=embedded_template()) as served:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            _ = [response async for response in served.stub.Generate(request)]
        assert served.generator.requests == []
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert words in (caught.value.details() or "")
