"""Texts held to JSON schemas, against `jsonschema`."""

import json
from functools import cache
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.structure.spec import StructureKind
from engine.tokenizer.tokenizer import Tokenizer
from gateway_api import embedded_tokenizer
from structured import BYTES, allowed_ids, byte_tokenizer, compiled, written


@cache
def tokenizer() -> Tokenizer:
    return byte_tokenizer(
        [*BYTES, b'{"', b'": ', b'", "', b'"}', b"], [", b"null", b"12", "é".encode(), b"\\u00", b"e+"]
    )


def text_of(output: list[int], of: Tokenizer) -> str:
    return b"".join(of.token_bytes(i) for i in output if i not in of.eos_token_ids).decode("utf-8")


# --- random schemas

names = st.sampled_from(["a", "b", "a b", 'q"', "é"])
scalars = st.one_of(
    st.just({"type": "null"}),
    st.just({"type": "boolean"}),
    st.just({"type": "string"}),
    st.just({"type": "number"}),
    st.just({}),
    st.tuples(st.integers(-200, 200), st.integers(0, 300)).map(
        lambda bounds: {"type": "integer", "minimum": bounds[0], "maximum": bounds[0] + bounds[1]}
    ),
    st.tuples(st.integers(-3, 3), st.integers(1, 3)).map(
        lambda bounds: {"type": "number", "exclusiveMinimum": bounds[0], "maximum": bounds[0] + bounds[1]}
    ),
    st.integers(1, 12).map(lambda n: {"type": "integer", "multipleOf": n}),
    st.tuples(st.integers(0, 2), st.integers(0, 3)).map(
        lambda bounds: {"type": "string", "minLength": bounds[0], "maxLength": bounds[0] + bounds[1]}
    ),
    st.sampled_from(["^[a-c]{2,3}$", "x", "^é", "[0-9]$"]).map(lambda pattern: {"type": "string", "pattern": pattern}),
    st.lists(
        st.one_of(st.none(), st.booleans(), st.integers(-9, 9), st.text(max_size=3), st.just({"a": [1]})),
        min_size=1,
        max_size=3,
    ).map(lambda values: {"enum": values}),
)


def objects(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    return st.dictionaries(names, inner, max_size=3).flatmap(
        lambda properties: (
            st.fixed_dictionaries(
                {
                    "type": st.just("object"),
                    "properties": st.just(properties),
                    "required": st.sets(st.sampled_from([*properties, "z"]), max_size=2).map(sorted),
                    "additionalProperties": st.sampled_from([True, {"type": "integer"}]),
                }
            )
            | st.fixed_dictionaries(
                {
                    "type": st.just("object"),
                    "properties": st.just(properties),
                    "required": st.just(list(properties)),
                    "additionalProperties": st.just(False),
                }
            )
        )
    )


schemas = st.recursive(
    scalars,
    lambda inner: st.one_of(
        objects(inner),
        st.tuples(inner, st.integers(0, 2), st.integers(0, 2)).map(
            lambda of: {"type": "array", "items": of[0], "minItems": of[1], "maxItems": of[1] + of[2]}
        ),
        st.lists(inner, min_size=1, max_size=3).map(lambda several: {"anyOf": several}),
    ),
    max_leaves=5,
)


@given(schema=schemas, seed=st.integers(0, 2**32))
@settings(max_examples=150, deadline=None)
def test_what_is_written_at_random_is_valid(schema: dict[str, Any], seed: int) -> None:
    matcher = compiled(StructureKind.JSON_SCHEMA, json.dumps(schema), tokenizer()).matcher()
    for text_seed in range(seed, seed + 4):
        output, has_ended = written(matcher, tokenizer(), text_seed, max_tokens=300)
        if has_ended:
            jsonschema.validate(json.loads(text_of(output, tokenizer())), schema)


def test_nearly_all_random_texts_end() -> None:
    """The test above is of little use otherwise."""
    matcher = compiled(StructureKind.JSON_OBJECT, "", tokenizer()).matcher()
    texts = [written(matcher, tokenizer(), seed, max_tokens=300) for seed in range(40)]
    assert sum(has_ended for _, has_ended in texts) > 30
    assert len({text_of(output, tokenizer()) for output, _ in texts}) > 10
    for output, has_ended in texts:
        assert not has_ended or isinstance(json.loads(text_of(output, tokenizer())), dict)


# --- what is written how


def accepts(schema: Any, text: str) -> bool:
    matcher = compiled(StructureKind.JSON_SCHEMA, json.dumps(schema), tokenizer()).matcher()
    output = [byte + 1 for byte in text.encode()]
    return all(output[n] in allowed_ids(matcher, output[:n]) for n in range(len(output))) and 0 in allowed_ids(
        matcher, output
    )


VALUE = {"b": [1, True, None, {"c": "d"}], "a": {}, "": [[], [[]]]}


def test_json_is_spaced_as_python_spaces_it() -> None:
    assert accepts({"type": "object"}, json.dumps(VALUE))
    for separators in ((",", ":"), (", ", ":"), (",", ": "), (",  ", ": ")):
        assert not accepts({"type": "object"}, json.dumps(VALUE, separators=separators))
    assert not accepts({"type": "object"}, json.dumps(VALUE, indent=1))
    assert not accepts({"type": "object"}, " {}")
    assert not accepts({"type": "object"}, "{}\n")


def test_a_schema_cannot_ask_for_other_whitespace() -> None:
    schema = {"type": "object", "x-guidance": {"whitespace_flexible": True, "item_separator": ",", "lenient": True}}
    assert accepts(schema, json.dumps(VALUE))
    assert not accepts(schema, json.dumps(VALUE, indent=1))


def test_properties_come_in_the_schemas_order() -> None:
    schema = {"type": "object", "properties": {"z": {}, "a": {}}, "additionalProperties": False}
    assert accepts(schema, '{"z": 1, "a": 2}')
    assert accepts(schema, '{"a": 2}')
    assert not accepts(schema, '{"a": 2, "z": 1}')


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"$ref": "#/$defs/n", "$defs": {"n": {"type": "array", "items": {"$ref": "#/$defs/n"}}}}, "[[], [[]]]", "[1]"),
        ({"const": {"a": "é"}}, '{"a": "é"}', '{"a": "e"}'),
        ({"oneOf": [{"type": "string"}, {"type": "integer"}]}, "3", "true"),
        ({"type": ["string", "null"]}, "null", "0"),
        ({"allOf": [{"type": "string"}, {"minLength": 2}]}, '"ab"', '"a"'),
        ({"type": "string", "format": "date"}, '"2024-02-29"', '"2024-02-30"'),
        ({"title": "T", "description": "D", "default": 1, "$schema": "https://json-schema.org/draft/2020-12/schema",
          "examples": [2], "type": "integer"}, "-7", "7.5"),
    ],
)  # fmt: skip
def test_schemas_as_people_write_them(schema: Any, good: str, bad: str) -> None:
    assert accepts(schema, good)
    assert not accepts(schema, bad)


# --- a model's own vocabulary

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "très bleu"]}, "maxItems": 3},
        "home": {"anyOf": [{"type": "null"}, {"$ref": "#"}]},
    },
    "required": ["name", "age", "tags", "home"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("vocab_size", [49152, 1000])
def test_random_tokens_of_the_embedded_model_are_a_valid_text(vocab_size: int) -> None:
    """All its tokens, and the thousand that a hash executor says."""
    model = embedded_tokenizer()
    matcher = compiled(StructureKind.JSON_SCHEMA, json.dumps(PERSON), model, vocab_size).matcher()
    num_ended = 0
    for seed in range(6):
        output, has_ended = written(matcher, model, seed, max_tokens=200)
        assert max(output) < vocab_size
        if has_ended:
            num_ended += 1
            jsonschema.validate(json.loads(model.decode(output)), PERSON)
    assert num_ended > 2


def test_the_embedded_models_own_way_of_writing_is_allowed() -> None:
    model = embedded_tokenizer()
    home = {"name": "A. Nother", "age": 8, "tags": [], "home": None}
    value = {"name": "Jane Döe \N{GRINNING FACE} \\n", "age": 103, "tags": ["red", "très bleu"], "home": home}
    output = model.encode(json.dumps(value, ensure_ascii=False), add_special_tokens=False)
    matcher = compiled(StructureKind.JSON_SCHEMA, json.dumps(PERSON), model).matcher()
    for n, token_id in enumerate(output):
        ids = allowed_ids(matcher, output[:n])
        assert token_id in ids
        assert not model.special_token_ids.intersection(ids)
    assert allowed_ids(matcher, output) == sorted(model.eos_token_ids)
