"""A structure's text, as a grammar in llguidance's dialect of Lark.

JSON is written as Python's `json.dumps` writes it: ", " and ": " between things, no other whitespace. Where a grammar
allows any amount, a small model, whose favourite next token is often a space or a newline, writes nothing else until
its tokens are used up.

Text that is bound to come may be cut into tokens as the model likes. The library would rather have its own cut, that
of the tokenizer; but no tokenizer's cut of a piece is sure to be its cut of the whole, and a vocabulary may be larger
than what the model can say.
"""

import json
from collections.abc import Mapping
from typing import Any

from llguidance import LLMatcher, regex_to_lark

from engine.strict_json import parse_json
from engine.structure.holdable import holdable
from engine.structure.spec import Structure, StructureKind

# Behind the rest, where it has the last word and moves no line that an error names.
_OPTIONS = '\n%llguidance {"no_forcing": true}\n'

_JSON_OPTIONS = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}


def grammar_of(structure: Structure) -> str:
    """The grammar of `structure`, in llguidance's own words. Whether it can be compiled is not known yet.

    Raises:
        ValueError: it is too long, or not what its kind says.
    """
    structure.check_text()
    lark = structure.text if structure.kind is StructureKind.GRAMMAR else lark_rules(structure, "start")
    return LLMatcher.grammar_from_lark(lark + _OPTIONS)


def lark_rules(structure: Structure, name: str) -> str:
    """The rule `name`, and what it stands on, for a text of this structure: all of a grammar, or a part of one.

    Raises:
        ValueError: it is too long, or not what its kind says, or is a grammar, which is no part of another.
    """
    structure.check_text()
    match structure.kind:
        case StructureKind.JSON_OBJECT:
            return f"{name}: {json_rule({'type': 'object'})}"
        case StructureKind.JSON_SCHEMA:
            return f"{name}: {_json_schema_rule(structure)}"
        case StructureKind.REGEX:
            return f"{name}: /{regex_to_lark(structure.text, use_ascii='')}/"
        case StructureKind.CHOICE:
            return _choice(structure.choices(), name)
        case StructureKind.GRAMMAR:
            raise ValueError("a grammar cannot be a part of another")


def json_rule(schema: Mapping[str, Any], *, strict: bool = False) -> str:
    """What stands for JSON of this schema in a rule.

    Args:
        strict: a keyword that cannot be held to is an error; otherwise it is dropped, and of a `oneOf` whose branches
            may overlap more than one may be true.

    Raises:
        ValueError: it is nested too deeply; or is strict, and a keyword's value cannot be held to.
    """
    options = {**_JSON_OPTIONS, "lenient": not strict, "coerce_one_of": not strict}
    try:
        # The library's own keyword, by which a schema could have said otherwise.
        return "%json " + json.dumps({**holdable(schema, strict=strict), "x-guidance": options})
    except RecursionError as exc:
        raise ValueError("it is nested too deeply") from exc


def _json_schema_rule(structure: Structure) -> str:
    schema = _schema(structure.text)
    try:
        return json_rule(schema, strict=structure.strict)
    except ValueError as exc:
        raise ValueError(f"json_schema cannot be used: {exc}") from exc


def _schema(text: str) -> dict[str, Any]:
    try:
        schema = parse_json(text)
    except RecursionError as exc:
        raise ValueError("json_schema is nested too deeply") from exc
    except ValueError as exc:
        raise ValueError(f"json_schema is not JSON: {exc}") from exc
    if not isinstance(schema, dict):
        raise ValueError(f"json_schema must be a JSON object, not {json.dumps(schema)[:40]}")
    return schema


def _choice(choices: list[str], name: str) -> str:
    if not choices:
        raise ValueError("choice must have at least one string")
    if any("\ud800" <= character <= "\udfff" for choice in choices for character in choice):
        raise ValueError("choice has a lone surrogate")
    # One terminal, not one for each: then nothing is decided before the text ends, and one may begin another.
    return f"{name}: CHOICE\nCHOICE: " + " | ".join(f'"{_escaped(choice)}"' for choice in choices)


def _escaped(text: str) -> str:
    """Inside a string of the grammar."""
    return "".join(_escaped_character(character) for character in text)


def _escaped_character(character: str) -> str:
    if character in '"\\':
        return "\\" + character
    # Escapes have four digits; what needs more may stand as it is.
    return character if " " <= character <= "~" or character > "\uffff" else f"\\u{ord(character):04x}"
