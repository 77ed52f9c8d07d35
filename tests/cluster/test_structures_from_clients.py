"""Schemas as clients' libraries make them, from the front doors down to the compiler, and how refusals are told."""

import functools
import json
from collections.abc import Callable, Sequence
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal
from uuid import UUID

import grpc
import jsonschema
import openai
import pytest
from pydantic import AwareDatetime, BaseModel, Field, HttpUrl, SecretStr

from cluster.errors import error_from_status
from cluster.generator import SequenceRequest
from engine.structure.compiler import StructureCompiler
from fake_generator import FakeGenerator
from gateway_api import Api, embedded_tokenizer, error_of
from generation_api import chatting, embedded_template, serving
from structured import written
from tandem.v1 import generation_pb2 as pb


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: Annotated[int, Field(ge=0, le=9)]


class Dog(BaseModel):
    kind: Literal["dog"]
    name: Annotated[str, Field(max_length=4)]


class Kept(BaseModel):
    """All of it can be held to, or is an annotation."""

    path: Path
    secret: SecretStr
    data: bytes
    colour: Colour
    pet: Annotated[Cat | Dog, Field(discriminator="kind")]
    id: UUID
    code: Annotated[str, Field(pattern=r"^[A-Z]{2}\d$")]
    price: Annotated[float, Field(multiple_of=0.01, ge=0, le=9)]
    note: str | None


class Dropped(BaseModel):
    numbers: set[Annotated[int, Field(ge=0, le=99)]]
    frozen: frozenset[bool]
    counts: dict[Colour, int]
    large: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
    step: Annotated[int, Field(multiple_of=7919)]
    word: Annotated[str, Field(json_schema_extra={"pattern": "^(?!x)[a-z]+$"})]
    pair: tuple[int, bool]
    at: AwareDatetime
    url: HttpUrl


@functools.cache
def compiler() -> StructureCompiler:
    return StructureCompiler(embedded_tokenizer(), 1000)


def obedient() -> FakeGenerator:
    """It writes, at random, what the structure allows; and refuses as a worker does."""

    @functools.cache
    def tokens(request_id: str, structure: Any) -> Sequence[int]:
        if structure is None:
            return [0]
        try:
            matcher = compiler().compile(structure).matcher()
        except ValueError as exc:
            raise error_from_status(grpc.StatusCode.INVALID_ARGUMENT, str(exc)) from exc
        return written(matcher, embedded_tokenizer(), seed=1, max_tokens=2000)[0]

    script: Callable[[SequenceRequest], Sequence[int]] = lambda request: tokens(  # noqa: E731
        request.request_id, request.params.structure
    )
    return FakeGenerator(script=script)


def client_of(api: Api) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url="http://gateway/v1", api_key="none", http_client=api.http, max_retries=0)


def response_format(schema: Any, *, strict: bool | None = None) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": strict}}


async def test_openais_parse_gives_a_model_whose_formats_are_annotations() -> None:
    reply = await client_of(Api(obedient())).chat.completions.parse(
        model="fake", messages=[{"role": "user", "content": "Hi"}], response_format=Kept, max_tokens=2000
    )
    assert reply.choices[0].finish_reason == "stop"
    assert isinstance(reply.choices[0].message.parsed, Kept)


@pytest.mark.parametrize("strict", [None, False])
async def test_a_schema_that_is_not_strict_is_held_to_as_far_as_can_be(strict: bool | None) -> None:
    schema = Dropped.model_json_schema()
    reply = await Api(obedient()).chat("Hi", max_tokens=2000, response_format=response_format(schema, strict=strict))
    assert reply.status_code == 200, reply.text
    assert reply.json()["choices"][0]["finish_reason"] == "stop"
    value = json.loads(reply.json()["choices"][0]["message"]["content"])
    held = json.loads(json.dumps(schema))
    for name, keyword in {
        "numbers": "uniqueItems",
        "frozen": "uniqueItems",
        "counts": "propertyNames",
        "step": "multipleOf",
        "word": "pattern",
    }.items():
        del held["properties"][name][keyword]
    jsonschema.validate(value, held)


@pytest.mark.parametrize("name", ["numbers", "counts", "large", "step", "word"])
async def test_a_strict_schema_is_refused_by_its_keyword(name: str) -> None:
    schema = {"type": "object", "properties": {name: Dropped.model_json_schema()["properties"][name]}}
    schema["$defs"] = Dropped.model_json_schema()["$defs"]
    keyword = {
        "numbers": "uniqueItems",
        "counts": "propertyNames",
        "large": "minimum|maximum",
        "step": "multipleOf",
        "word": "pattern",
    }[name]
    error = error_of(await Api(obedient()).chat("Hi", response_format=response_format(schema, strict=True)), 400)
    assert error["param"] == "response_format"
    assert error["message"].startswith("response_format cannot be used: ")
    assert any(word in error["message"] for word in keyword.split("|"))


BAD: dict[str, Any] = {"type": "array", "items": {"type": "nothing"}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": response_format(BAD)}, "response_format"),
        ({"guided_json": BAD}, "guided_json"),
        ({"guided_regex": "[a"}, "guided_regex"),
        ({"guided_grammar": "start: nowhere"}, "guided_grammar"),
        ({"structured_outputs": {"regex": "[a"}}, "structured_outputs"),
    ],
)
@pytest.mark.parametrize("is_chat", [False, True], ids=["completion", "chat"])
@pytest.mark.parametrize("stream", [False, True])
async def test_what_a_worker_refuses_is_called_as_the_client_calls_it(
    fields: dict[str, Any], param: str, is_chat: bool, stream: bool
) -> None:
    api = Api(obedient())
    error = error_of(await (api.chat if is_chat else api.complete)("Hi", stream=stream, **fields), 400)
    assert error["param"] == param
    assert error["message"].startswith(f"{param} cannot be used: ")


def tool(name: str, schema: Any = None, *, strict: bool = False) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"x": schema or {"type": "integer"}}}
    return {"type": "function", "function": {"name": name, "parameters": parameters, "strict": strict}}


UNIQUE = {"type": "array", "uniqueItems": True}
AHEAD = {"type": "string", "pattern": "(?=a)"}


@pytest.mark.parametrize(
    "fields",
    [
        {"tool_choice": "required"},
        {"tool_choice": {"type": "function", "function": {"name": "b"}}},
        {"response_format": {"type": "json_object"}},
        {"response_format": response_format({"type": "object"}), "tool_choice": "auto"},
    ],
    ids=["required", "named", "or JSON", "or a schema"],
)
@pytest.mark.parametrize(
    ("schema", "strict", "words"),
    [
        (BAD, False, "Invalid type: nothing"),
        (UNIQUE, True, "uniqueItems"),
        (AHEAD, True, "pattern"),
        (UNIQUE, False, None),
        (AHEAD, False, None),
    ],
)
async def test_a_tools_schema_is_called_by_its_tool(
    fields: dict[str, Any], schema: Any, strict: bool, words: str | None
) -> None:
    tools = [tool("a"), tool("b", schema, strict=strict), tool("c")]
    reply = await Api(obedient()).chat("Hi", max_tokens=500, tools=tools, **fields)
    if words is None:
        assert reply.status_code == 200, reply.text
        return
    error = error_of(reply, 400)
    assert error["param"] == "tools[1].function.parameters"
    assert error["message"].startswith("tools[1].function.parameters cannot be used: ")
    assert words in error["message"]
    assert "in line" not in error["message"]


@pytest.mark.parametrize("strict", [False, True])
async def test_a_format_beside_tools_is_called_by_its_field(strict: bool) -> None:
    schema = {"type": "object", "properties": {"x": AHEAD if strict else BAD}}
    fields = {"tools": [tool("a")], "response_format": response_format(schema, strict=strict)}
    error = error_of(await Api(obedient()).chat("Hi", **fields), 400)
    assert error["param"] == "response_format"
    assert error["message"].startswith("response_format cannot be used: ")


async def test_over_grpc_it_is_the_structure_or_the_tool() -> None:
    bad = chatting()
    bad.sampling_params.structure.regex = "[a"
    tools = [pb.Tool(name=name, parameters=json.dumps({"properties": {"x": UNIQUE}}), strict=True) for name in "ab"]
    choice = pb.ToolChoice(mode="required")
    for request, words in (
        (bad, "structure.regex cannot be used: "),
        (chatting(tools=tools, tool_choice=choice), "tools[0].function.parameters cannot be used: "),
    ):
        async with serving(obedient(), template=embedded_template()) as served:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                _ = [response async for response in served.stub.Generate(request)]
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert caught.value.details().startswith(words)


async def test_what_is_not_about_the_structure_is_left_as_it_is() -> None:
    error = error_from_status(grpc.StatusCode.INVALID_ARGUMENT, "the prompt needs 99 blocks")
    told = error_of(await Api(FakeGenerator(fail=error)).complete("Hi", guided_regex="a"), 400)
    assert (told["message"], told["param"]) == ("the prompt needs 99 blocks", None)
