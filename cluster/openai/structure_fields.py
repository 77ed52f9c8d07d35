"""The fields that ask for structured output, OpenAI's and vLLM's: what they say, as one `Structure`.

`response_format` is OpenAI's; the others are vLLM's, older (`guided_…`) and newer (`structured_outputs`). Whether a
schema, an expression or a grammar can be followed is known to the workers, which refuse it if not.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from cluster.errors import InvalidRequest
from cluster.quotation import shorten
from cluster.tools.schema_depth import check_depth
from engine.structure.spec import Structure, StructureKind

FORMAT_NAME_PATTERN = "[a-zA-Z0-9_-]{1,64}"  # of a response_format's schema
_ANY_OBJECT = Structure(StructureKind.JSON_OBJECT)


def requested_structure(fields: Mapping[str, Any]) -> tuple[str, Structure] | None:
    """The field that says what the text is held to, and what that is; None: nothing.

    Args:
        fields: of the request; absent ones are None or not there.

    Raises:
        InvalidRequest: names the field; of two that ask for a structure the second.
    """
    found: dict[str, Structure] = {}
    for name, parse in _PARSERS.items():
        value = fields.get(name)
        if value is not None and (structure := parse(value, name)) is not None:
            try:
                structure.check_text()
            except ValueError as exc:
                raise InvalidRequest(f"{name}: {exc}", param=name) from exc
            found[name] = structure
    if len(found) > 1:
        first, second, *_ = found
        raise InvalidRequest(f"{second} is not allowed together with {first}: a text has one structure", param=second)
    return next(iter(found.items()), None)


def _response_format(value: Any, where: str) -> Structure | None:
    kind = value.get("type") if isinstance(value, dict) else None
    match kind:
        case "text":
            return None
        case "json_object":
            return _ANY_OBJECT
        case "json_schema":
            return _named_schema(value.get("json_schema"), f"{where}.json_schema")
    if not isinstance(value, dict):
        raise InvalidRequest(f"{where} must be an object, not {shorten(value)}", param=where)
    raise InvalidRequest(
        f'{where}.type must be "text", "json_object" or "json_schema", not {shorten(kind)}', param=f"{where}.type"
    )


def _named_schema(value: Any, where: str) -> Structure:
    if not isinstance(value, dict):
        raise InvalidRequest(f"{where} must be an object, not {shorten(value)}", param=where)
    name = value.get("name")
    if not isinstance(name, str) or not re.fullmatch(FORMAT_NAME_PATTERN, name):
        raise InvalidRequest(
            f"{where}.name must be 1 to 64 of the characters a-z, A-Z, 0-9, _ and -, not {shorten(name)}",
            param=f"{where}.name",
        )
    for key, kind, what in (("description", str, "a string"), ("strict", bool, "true or false")):
        if value.get(key) is not None and not isinstance(value[key], kind):
            raise InvalidRequest(f"{where}.{key} must be {what}, not {shorten(value[key])}", param=f"{where}.{key}")
    schema = value.get("schema")
    if schema is None:
        return _ANY_OBJECT
    return replace(_json_schema(schema, f"{where}.schema"), strict=value.get("strict") is True)


def _json_schema(value: Any, where: str) -> Structure:
    """A schema as an object, or as a string that holds one."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as exc:
            raise InvalidRequest(f"{where} is a string, but not one that holds JSON: {exc}", param=where) from exc
    if not isinstance(value, dict):
        raise InvalidRequest(f"{where} must be a JSON schema, not {shorten(value)}", param=where)
    check_depth(value, where)
    try:
        text = json.dumps(value, allow_nan=False)
    except ValueError as exc:
        raise InvalidRequest(f"{where} holds a number that JSON does not have: {exc}", param=where) from exc
    return Structure(StructureKind.JSON_SCHEMA, text)


def _regex(value: Any, where: str) -> Structure:
    return Structure(StructureKind.REGEX, _text(value, where))


def _grammar(value: Any, where: str) -> Structure:
    return Structure(StructureKind.GRAMMAR, _text(value, where))


def _choice(value: Any, where: str) -> Structure:
    if not isinstance(value, list) or not value or not all(isinstance(item, str) for item in value):
        raise InvalidRequest(f"{where} must be a list of at least one string, not {shorten(value)}", param=where)
    return Structure.of_choices(value)


def _any_object(value: Any, where: str) -> Structure | None:
    if not isinstance(value, bool):
        raise InvalidRequest(f"{where} must be true or false, not {shorten(value)}", param=where)
    return _ANY_OBJECT if value else None


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str) or not value:
        raise InvalidRequest(f"{where} must be a string that is not empty, not {shorten(value)}", param=where)
    return value


def _structured_outputs(value: Any, where: str) -> Structure | None:
    if not isinstance(value, dict):
        raise InvalidRequest(f"{where} must be an object, not {shorten(value)}", param=where)
    given = [name for name, inner in value.items() if name in _INNER_PARSERS and inner not in (None, False)]
    if len(given) != 1:
        raise InvalidRequest(
            f"{where} must have one of {', '.join(_INNER_PARSERS)}, and has {', '.join(given) or 'none'}", param=where
        )
    (name,) = given
    return _INNER_PARSERS[name](value[name], f"{where}.{name}")


_Parser = Callable[[Any, str], Structure | None]
_INNER_PARSERS: dict[str, _Parser] = {
    "json": _json_schema,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
    "json_object": _any_object,
}
_PARSERS: dict[str, _Parser] = {
    "response_format": _response_format,
    "guided_json": _json_schema,
    "guided_regex": _regex,
    "guided_choice": _choice,
    "guided_grammar": _grammar,
    "structured_outputs": _structured_outputs,
}
STRUCTURE_FIELDS = tuple(_PARSERS)
