"""A JSON schema without what texts cannot be held to.

Clients send what their libraries make of a data type, and do not mean every keyword as a condition. A schema that is
not strict loses what cannot be held to; of a strict one that is an error. The library knows the keywords that it does
not implement, and drops them by itself if it may (`lenient`). Here are those that it implements in part: it would
refuse all of the schema for the sake of a pattern's look-ahead, or keep to something else than what was asked for.

`format` says what a text is about, and is a condition only if both sides know it (JSON Schema 2020-12, "Vocabularies
for Semantic Content"): an unknown one is never an error.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

# What the library has an expression for.
FORMATS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown")
)

# Behind them stand values or names, not schemas.
_LITERALS = frozenset(("const", "enum", "default", "examples", "example", "required"))
_SCHEMAS_BY_NAME = frozenset(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"))

_MAX_MULTIPLE = 1000  # an automaton has a state for each remainder
_MAX_INT64 = 2**63 - 1
# What the dialect of a schema's author, ECMA's or Python's, has in common with Rust's, in which the library reads it.
# Nothing is taken back, so that no pattern is read twice.
_ESCAPE = r"\\(?:[dDsSwWnrtfv]|x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4}|[pP]\{[\w=]+\}|[^\w\s<>])"
_CLASS = rf"\[\^?+(?:{_ESCAPE}|\[:\w+:\]|[^\\\[\]])++\]"
_GROUP = r"\((?!\?)|\(\?(?:[is]*:|P?<[A-Za-z_]\w*>)|\(\?[is]+\)"
_REPEATED = r"\{\d+(?:,\d*)?\}"
_PATTERN = re.compile(rf"(?:{_ESCAPE}|\\[Az]|{_CLASS}|{_GROUP}|{_REPEATED}|[^\\\[\](){{}}]|\))*+")


def holdable(schema: Mapping[str, Any], *, strict: bool) -> dict[str, Any]:
    """A copy that the library does not refuse for a value of a keyword that it knows.

    Raises:
        ValueError: `strict`, and a keyword cannot be held to; the message names it.
    """
    found: dict[str, Any] = _holdable(schema, strict=strict)
    return found


def _holdable(schema: Any, *, strict: bool) -> Any:
    if isinstance(schema, list):
        return [_holdable(each, strict=strict) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    found: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "format" and isinstance(value, str) and value not in FORMATS:
            continue
        problem = _CHECKS[key](value) if key in _CHECKS else None
        if problem is not None:
            if strict:
                raise ValueError(f"{key} cannot be held to: {problem}")
        elif key in _LITERALS:
            found[key] = value
        elif key in _SCHEMAS_BY_NAME and isinstance(value, Mapping):
            found[key] = {name: _holdable(each, strict=strict) for name, each in value.items()}
        else:
            found[key] = _holdable(value, strict=strict)
    if "patternProperties" in schema and "patternProperties" not in found:
        _open(found, [_holdable(each, strict=strict) for each in schema["patternProperties"].values()])
    return found


def _open(found: dict[str, Any], values: list[Any]) -> None:
    """To what the properties of patterns may be: no name of theirs is told from others any more."""
    others = found.get("additionalProperties", False)
    found["additionalProperties"] = {"anyOf": values if others is False else [*values, others]}


# --- what is wrong with a value, if anything; what is of a wrong type is left to the library


def _pattern(value: Any) -> str | None:
    if isinstance(value, str) and not _PATTERN.fullmatch(value):
        return f"{value[:100]!r} has a look-around, a back reference, or something else that is not supported"
    return None


def _patterns(value: Any) -> str | None:
    problems = [_pattern(pattern) for pattern in value] if isinstance(value, Mapping) else []
    return next((problem for problem in problems if problem is not None), None)


def _multiple(value: Any) -> str | None:
    if not _is_number(value) or value <= 0:
        return None
    digits = re.sub(r"\.|e.*", "", repr(value))
    if not 1e-9 <= value <= 1e9 or int(digits.strip("0") or "0") > _MAX_MULTIPLE:
        return f"{_short(value)} is too large or small, or has too many digits"
    return None


def _bound(value: Any) -> str | None:
    """The library reads it as a float of 64 bits, and an integer's then as an integer of 64 bits."""
    if not _is_number(value):
        return None
    if abs(value) >= 2**63 or (isinstance(value, int) and int(float(value)) != value):
        return f"{_short(value)} is beyond what numbers of 64 bits can be"
    return None


def _count(value: Any) -> str | None:
    return f"{_short(value)} is too large" if _is_number(value) and value > _MAX_INT64 else None


def _literal(value: Any) -> str | None:
    if isinstance(value, (list, Mapping)):
        inner = value.values() if isinstance(value, Mapping) else value
        return next((problem for each in inner if (problem := _literal(each)) is not None), None)
    if isinstance(value, int) and not -_MAX_INT64 - 1 <= value <= _MAX_INT64:
        return f"{_short(value)} is beyond what numbers of 64 bits can be"
    return None


def _short(value: float) -> str:
    return text if len(text := str(value)) <= 40 else text[:40] + "…"


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


_CHECKS: dict[str, Callable[[Any], str | None]] = {
    "pattern": _pattern,
    "patternProperties": _patterns,
    "multipleOf": _multiple,
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), _bound),
    **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"), _count),
    **dict.fromkeys(("const", "enum"), _literal),
}
