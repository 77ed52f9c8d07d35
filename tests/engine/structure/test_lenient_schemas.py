"""Schemas as clients' libraries make them: what cannot be held to is dropped, or, of a strict one, an error."""

import json
from typing import Any

import jsonschema
import pytest

from engine.structure.compiler import StructureCompiler
from engine.structure.holdable import FORMATS, holdable
from engine.structure.spec import Structure, StructureKind
from structured import BYTES, byte_tokenizer, written

TOKENIZER = byte_tokenizer(BYTES)
COMPILER = StructureCompiler(TOKENIZER, TOKENIZER.vocab_size)

A, B = ({"type": "object", "properties": {name: {"type": "string"}}} for name in "ab")
DROPPED: list[tuple[str, dict[str, Any]]] = [
    ("uniqueItems", {"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True}),
    ("propertyNames", {"type": "object", "propertyNames": {"enum": ["a"]}, "additionalProperties": {"type": "null"}}),
    ("not", {"type": "object", "not": {"required": ["a"]}}),
    ("if", {"type": "object", "if": {"required": ["a"]}, "then": {"required": ["b"]}}),
    ("contains", {"type": "array", "contains": {"const": 1}}),
    ("dependentRequired", {"type": "object", "dependentRequired": {"a": ["b"]}}),
    ("unevaluatedProperties", {"type": "object", "unevaluatedProperties": False}),
    ("oneOf", {"oneOf": [A, B]}),
    ("pattern", {"type": "string", "pattern": "^(?=.*[0-9]).{3,}$", "maxLength": 5}),
    ("pattern", {"type": "string", "pattern": r"^(a)\1$"}),
    ("pattern", {"type": "string", "pattern": r"\bfoo\b"}),
    ("pattern", {"type": "string", "pattern": r"^a\Z"}),
    ("patternProperties", {"type": "object", "patternProperties": {"^(?!_)": {"type": "null"}}}),
    ("multipleOf", {"type": "integer", "multipleOf": 7919}),
    ("multipleOf", {"type": "integer", "multipleOf": 10**30}),
    ("multipleOf", {"type": "number", "multipleOf": 1e-12}),
    ("minimum", {"type": "integer", "minimum": 10**30, "maximum": 10**30 + 5}),
    ("minimum", {"type": "integer", "minimum": -(2**63)}),
    ("maximum", {"type": "integer", "maximum": 2**53 + 1}),
    ("exclusiveMaximum", {"type": "number", "exclusiveMaximum": 1e30}),
    ("maxLength", {"type": "string", "maxLength": 10**30}),
    ("const", {"const": {"a": [2**63]}}),
    ("enum", {"enum": [-(2**63) - 1]}),
]


@pytest.mark.parametrize(("keyword", "schema"), DROPPED, ids=lambda value: str(value)[:40])
def test_a_keyword_that_cannot_be_held_to_is_dropped_or_is_an_error(keyword: str, schema: dict[str, Any]) -> None:
    nested = {"type": "object", "properties": {keyword: {"$ref": "#/$defs/A"}}, "$defs": {"A": schema}}
    nested |= {"required": [keyword], "additionalProperties": False}
    text = json.dumps(nested)
    with pytest.raises(ValueError, match=rf"json_schema cannot be used: .*\b{keyword}\b"):
        COMPILER.compile(Structure(StructureKind.JSON_SCHEMA, text, strict=True))
    matcher = COMPILER.compile(Structure(StructureKind.JSON_SCHEMA, text)).matcher()
    output, has_ended = written(matcher, TOKENIZER, seed=3, max_tokens=400)
    assert has_ended
    value = json.loads(b"".join(TOKENIZER.token_bytes(i) for i in output[:-1]))
    without = {key: each for key, each in schema.items() if key not in (keyword, "then", "maximum")}
    jsonschema.validate(value[keyword], without)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", ["path", "password", "binary", "uri-reference", "byte", "regex", "idn-email", "int64"])
def test_an_unknown_format_is_an_annotation(name: str, strict: bool) -> None:
    schema = {"type": "object", "properties": {"format": {"type": "string", "format": name}}}
    COMPILER.compile(Structure(StructureKind.JSON_SCHEMA, json.dumps(schema), strict=strict))
    assert holdable(schema, strict=strict) == {"type": "object", "properties": {"format": {"type": "string"}}}


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_a_known_format_is_kept(name: str) -> None:
    schema = {"type": "string", "format": name}
    assert holdable(schema, strict=True) == schema
    COMPILER.compile(Structure(StructureKind.JSON_SCHEMA, json.dumps(schema), strict=True))


@pytest.mark.parametrize(
    "pattern",
    [
        "",
        "^[a-z]{2,3}$",
        r"^\d+(\.\d{1,2})?$",
        r"^[^@\s]+@[\w.-]+\.[a-z]{2,}$",
        r"[(?=\\]",
        r"^(?:a|b)*?(?P<n>c)$",
        r"^(?i)a",
        r"[[:alpha:]]\p{L}A\-\/",
        r"^\(\?=é$",
    ],
)
def test_a_pattern_that_can_be_held_to_is_kept(pattern: str) -> None:
    schema = {"type": "string", "pattern": pattern}
    assert holdable(schema, strict=True) == schema
    COMPILER.compile(Structure(StructureKind.JSON_SCHEMA, json.dumps(schema), strict=True))


def test_bounds_that_are_integers_of_64_bits_are_kept() -> None:
    schema = {"type": "integer", "minimum": -(2**62), "maximum": 2**62, "multipleOf": 1000, "enum": [2**63 - 1, True]}
    assert holdable(schema, strict=True) == schema


def test_names_and_values_are_no_keywords() -> None:
    schema = {
        "properties": {"pattern": {"type": "string"}, "multipleOf": {"const": {"format": "path", "pattern": "(?=a)"}}},
        "required": ["pattern"],
        "default": {"pattern": "(?=a)", "format": "path"},
    }
    assert holdable(schema, strict=True) == schema


def test_without_its_patterns_an_object_is_open_to_what_they_allowed() -> None:
    schema = {"patternProperties": {"(?=a)": {"type": "integer"}}, "additionalProperties": False}
    assert holdable(schema, strict=False) == {"additionalProperties": {"anyOf": [{"type": "integer"}]}}


def test_strictness_is_no_matter_of_what_was_compiled_before() -> None:
    text = json.dumps({"type": "array", "uniqueItems": True})
    COMPILER.compile(Structure(StructureKind.JSON_SCHEMA, text))
    for _ in range(2):
        with pytest.raises(ValueError, match="uniqueItems"):
            COMPILER.compile(Structure(StructureKind.JSON_SCHEMA, text, strict=True))
    COMPILER.compile(Structure(StructureKind.JSON_SCHEMA, text))


def test_a_long_number_is_not_told_to_the_end() -> None:
    with pytest.raises(ValueError, match=r"minimum cannot be held to: 10{39}…") as caught:
        holdable({"minimum": 10**4000}, strict=True)
    assert len(str(caught.value)) < 120


def test_a_hostile_pattern_is_read_once() -> None:
    for pattern in ("(" * 30_000 + "\\b", "[" * 60_000, "\\\\" * 30_000 + "\\b", "[a" * 30_000, "(?" * 30_000):
        assert holdable({"pattern": pattern}, strict=False) == {}
