"""Structured output over HTTP: each field that asks for it, and how it is refused."""

import json
from dataclasses import replace
from typing import Any

import pytest

from engine.structure.spec import Structure, StructureKind
from gateway_api import Api, error_of

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
ANY_OBJECT = Structure(StructureKind.JSON_OBJECT)
OF_SCHEMA = Structure(StructureKind.JSON_SCHEMA, json.dumps(SCHEMA))


def named(**fields: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", **fields}}}


@pytest.mark.parametrize(
    ("fields", "structure"),
    [
        ({}, None),
        ({"response_format": None}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, ANY_OBJECT),
        (named(), ANY_OBJECT),
        (named(schema=SCHEMA, strict=True, description="d"), replace(OF_SCHEMA, strict=True)),
        (named(schema=SCHEMA, strict=False), OF_SCHEMA),
        ({"guided_json": SCHEMA}, OF_SCHEMA),
        ({"guided_json": json.dumps(SCHEMA)}, OF_SCHEMA),
        ({"guided_regex": "[ab]+"}, Structure(StructureKind.REGEX, "[ab]+")),
        ({"guided_choice": ["é", "b"]}, Structure.of_choices(["é", "b"])),
        ({"guided_grammar": 'start: "x"'}, Structure(StructureKind.GRAMMAR, 'start: "x"')),
        ({"structured_outputs": {"json": SCHEMA}}, OF_SCHEMA),
        ({"structured_outputs": {"regex": "[ab]+", "json": None}}, Structure(StructureKind.REGEX, "[ab]+")),
        ({"structured_outputs": {"choice": ["a"]}}, Structure.of_choices(["a"])),
        ({"structured_outputs": {"grammar": 'start: "x"'}}, Structure(StructureKind.GRAMMAR, 'start: "x"')),
        ({"structured_outputs": {"json_object": True}}, ANY_OBJECT),
        ({"guided_json": SCHEMA, "response_format": {"type": "text"}}, OF_SCHEMA),
    ],
)
@pytest.mark.parametrize("is_chat", [False, True], ids=["completion", "chat"])
async def test_field_becomes_the_structure_of_the_sequence(
    fields: dict[str, Any], structure: Structure | None, is_chat: bool
) -> None:
    api = Api()
    reply = await (api.chat if is_chat else api.complete)("Hi", max_tokens=1, **fields)
    assert reply.status_code == 200, reply.text
    assert api.generator.requests[0].params.structure == structure


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {}}, "response_format.type"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.name"),
        (named(name="a b"), "response_format.json_schema.name"),
        (named(strict="yes"), "response_format.json_schema.strict"),
        (named(description=5), "response_format.json_schema.description"),
        (named(schema=[]), "response_format.json_schema.schema"),
        ({"guided_json": 5}, "guided_json"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": '{"const": NaN}'}, "guided_json"),
        ({"guided_regex": ""}, "guided_regex"),
        ({"guided_regex": 5}, "guided_regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": [1]}, "guided_choice[0]"),
        ({"guided_grammar": 5}, "guided_grammar"),
        ({"structured_outputs": 5}, "structured_outputs"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"json": SCHEMA, "regex": "a"}}, "structured_outputs"),
        ({"structured_outputs": {"json": 5}}, "structured_outputs.json"),
        ({"structured_outputs": {"choice": "a"}}, "structured_outputs.choice"),
        ({"structured_outputs": {"json_object": 1}}, "structured_outputs.json_object"),
        ({"guided_json": SCHEMA, "response_format": {"type": "json_object"}}, "guided_json"),
        ({"guided_regex": "a", "structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
        ({"guided_regex": "a" * 70_000}, "guided_regex"),
        ({"structured_outputs": {"choice": ["é" * 40_000]}}, "structured_outputs"),
    ],
)
@pytest.mark.parametrize("is_chat", [False, True], ids=["completion", "chat"])
async def test_structure_that_is_none_is_refused_by_its_field(
    fields: dict[str, Any], param: str, is_chat: bool
) -> None:
    api = Api()
    error = error_of(await (api.chat if is_chat else api.complete)("Hi", max_tokens=1, **fields), 400)
    assert error["param"] == param
    assert param.partition("[")[0] in error["message"]
    assert api.generator.requests == []
