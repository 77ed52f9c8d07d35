"""JSON schemas of the fields that are checked by hand, for the API description: what a schema can say of them."""

from typing import Any

from cluster.openai.structure_fields import FORMAT_NAME_PATTERN
from cluster.tools.tool import MAX_TOOLS, NAME_PATTERN

Schema = dict[str, Any]


def _object(properties: Schema, *required: str) -> Schema:
    return {"type": "object", "properties": properties, "required": list(required)}


def _nullable(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


_STRING: Schema = {"type": "string"}
_FUNCTION_NAME: Schema = {"type": "string", "pattern": f"^{NAME_PATTERN}$"}
_ANY_SCHEMA: Schema = {"type": "object", "description": "A JSON schema."}


def _named(kind: str) -> Schema:
    return _object({"type": {"const": kind}, "function": _object({"name": _STRING}, "name")}, "type", "function")


RESPONSE_FORMAT_SCHEMA: Schema = _nullable(
    {
        "oneOf": [
            _object({"type": {"const": "text"}}, "type"),
            _object({"type": {"const": "json_object"}}, "type"),
            _object(
                {
                    "type": {"const": "json_schema"},
                    "json_schema": _object(
                        {
                            "name": {"type": "string", "pattern": f"^{FORMAT_NAME_PATTERN}$"},
                            "description": _nullable(_STRING),
                            "schema": _nullable(_ANY_SCHEMA),
                            "strict": _nullable({"type": "boolean"}),
                        },
                        "name",
                    ),
                },
                "type",
                "json_schema",
            ),
        ]
    }
)

TOOLS_SCHEMA: Schema = _nullable(
    {
        "type": "array",
        "maxItems": MAX_TOOLS,
        "items": _object(
            {
                "type": {"const": "function"},
                "function": _object(
                    {
                        "name": _FUNCTION_NAME,
                        "description": _nullable(_STRING),
                        "parameters": _nullable(_ANY_SCHEMA),
                        "strict": _nullable({"type": "boolean"}),
                    },
                    "name",
                ),
            },
            "type",
            "function",
        ),
    }
)

TOOL_CHOICE_SCHEMA: Schema = {
    "anyOf": [
        {"enum": ["none", "auto", "required", None]},
        _named("function"),
        _object(
            {
                "type": {"const": "allowed_tools"},
                "allowed_tools": _object(
                    {
                        "mode": {"enum": ["auto", "required"]},
                        "tools": {"type": "array", "minItems": 1, "items": _named("function")},
                    },
                    "mode",
                    "tools",
                ),
            },
            "type",
            "allowed_tools",
        ),
    ]
}

_TEXT_PART: Schema = _object({"type": {"const": "text"}, "text": _STRING}, "type", "text")
_REFUSAL_PART: Schema = _object({"type": {"const": "refusal"}, "refusal": _STRING}, "type", "refusal")
_CONTENT: Schema = {"anyOf": [_STRING, {"type": "array", "items": {"anyOf": [_TEXT_PART, _REFUSAL_PART]}}]}
_CALL: Schema = _object(
    {
        "id": _STRING,
        "type": {"const": "function"},
        "function": _object(
            {"name": _STRING, "arguments": {"anyOf": [_STRING, {"type": "object"}, {"type": "null"}]}}, "name"
        ),
    },
    "function",
)


def _message(role: str, **fields: Schema) -> Schema:
    return _object({"role": {"const": role}, "content": _CONTENT} | fields, "role", "content")


_ASSISTANT_CALLS: Schema = _object(
    {
        "role": {"const": "assistant"},
        "content": _nullable(_CONTENT),
        "tool_calls": {"type": "array", "minItems": 1, "items": _CALL},
    },
    "role",
    "tool_calls",
)

MESSAGES_SCHEMA: Schema = {
    "type": "array",
    "minItems": 1,
    "items": {
        "anyOf": [
            *(_message(role) for role in ("system", "developer", "user", "assistant")),
            _ASSISTANT_CALLS,
            _message("tool", tool_call_id=_nullable(_STRING), name=_nullable(_STRING)),
            _message("function", name=_nullable(_STRING)),
        ]
    },
}
