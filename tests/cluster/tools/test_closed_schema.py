"""Objects that say nothing of other properties, closed."""

from typing import Any

import pytest

from cluster.tools.closed_schema import closed

CITY: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}}}
CLOSED_CITY: dict[str, Any] = CITY | {"additionalProperties": False}


def test_object_that_names_its_properties_has_no_others() -> None:
    assert closed(CITY) == CLOSED_CITY
    assert closed({"type": "object", "properties": {}})["additionalProperties"] is False


def test_objects_within_are_closed_too() -> None:
    schema = {
        "type": "object",
        "properties": {"places": {"type": "array", "items": CITY}, "home": {"$ref": "#/$defs/city"}},
        "$defs": {"city": CITY},
    }
    assert closed(schema) == {
        "type": "object",
        "properties": {"places": {"type": "array", "items": CLOSED_CITY}, "home": {"$ref": "#/$defs/city"}},
        "$defs": {"city": CLOSED_CITY},
        "additionalProperties": False,
    }


@pytest.mark.parametrize(
    "schema",
    [
        CITY | {"additionalProperties": True},
        CITY | {"additionalProperties": {"type": "string"}},
        CITY | {"patternProperties": {"^x": {}}},
        {"type": "object"},
        {"anyOf": [CITY, {"type": "null"}]},
        CITY | {"anyOf": [{"properties": {"street": {}}}]},
        {"allOf": [CITY, {"properties": {"street": {}}}]},
    ],
)
def test_whatever_says_more_stays_as_it_is(schema: dict[str, Any]) -> None:
    assert closed(schema) == schema


def test_definition_that_may_be_a_part_of_another_object_stays_open() -> None:
    both = {"allOf": [{"$ref": "#/$defs/city"}, {"properties": {"street": {}}}]}
    schema = {"type": "object", "properties": {"both": both}, "$defs": {"city": CITY}}
    assert closed(schema) == schema | {"additionalProperties": False}


def test_what_was_given_is_not_changed() -> None:
    schema = {"type": "object", "properties": {"places": {"type": "array", "items": dict(CITY)}}}
    closed(schema)
    assert schema == {"type": "object", "properties": {"places": {"type": "array", "items": CITY}}}
