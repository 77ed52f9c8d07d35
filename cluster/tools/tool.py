"""A function that the model may ask for."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cluster.errors import InvalidRequest
from cluster.quotation import shorten
from cluster.tools.closed_schema import closed
from cluster.tools.schema_depth import check_depth
from engine.structure.grammar import json_rule

MAX_TOOLS = 128  # OpenAI's bound
NAME_PATTERN = "[a-zA-Z0-9_.-]{1,64}"  # OpenAI's, and the dot, which other clients put in


@dataclass(frozen=True, slots=True)
class Tool:
    """One function: what it is called, what it is for, and the JSON schema of its arguments."""

    name: str
    parameters: Mapping[str, Any]  # always of an object
    description: str | None = None
    strict: bool = False  # a keyword that arguments cannot be held to is an error, where they are held to any
    where: str = field(default="tools", compare=False)  # what errors call the schema

    def json(self) -> dict[str, Any]:
        """As chat templates expect it."""
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        return {"type": "function", "function": function | {"parameters": dict(self.parameters)}}

    def arguments_rule(self) -> str:
        """What stands for the arguments in a grammar.

        Raises:
            InvalidRequest: the schema cannot be held to, and is strict.
        """
        try:
            return json_rule(closed(self.parameters), strict=self.strict)
        except ValueError as exc:
            raise InvalidRequest(f"{self.where} cannot be used: {exc}", param=self.where) from exc


def parse_tools(value: Any) -> tuple[Tool, ...]:
    """`tools` of a request; none, if it is absent.

    Raises:
        InvalidRequest: names the tool, the field and what is allowed.
    """
    if value is None:
        return ()
    if not isinstance(value, list):
        raise InvalidRequest(f"tools must be a list, not {shorten(value)}", param="tools")
    if len(value) > MAX_TOOLS:
        raise InvalidRequest(f"tools has {len(value)} tools; at most {MAX_TOOLS} are allowed", param="tools")
    tools: dict[str, Tool] = {}
    for number, item in enumerate(value):
        tool = _tool(item, f"tools[{number}]")
        if tool.name in tools:
            where = f"tools[{number}].function.name"
            raise InvalidRequest(f"{where} is {tool.name!r}, which an earlier tool is called as well", param=where)
        tools[tool.name] = tool
    return tuple(tools.values())


def _tool(value: Any, where: str) -> Tool:
    if not isinstance(value, dict):
        raise InvalidRequest(f"{where} must be an object, not {shorten(value)}", param=where)
    if value.get("type") != "function":
        raise InvalidRequest(
            f'{where}.type must be "function", not {shorten(value.get("type"))}', param=f"{where}.type"
        )
    function = value.get("function")
    where = f"{where}.function"
    if not isinstance(function, dict):
        raise InvalidRequest(f"{where} must be an object, not {shorten(function)}", param=where)
    description = function.get("description")
    if description is not None and not isinstance(description, str):
        raise InvalidRequest(f"{where}.description must be a string", param=f"{where}.description")
    strict = function.get("strict")
    if strict is not None and not isinstance(strict, bool):
        raise InvalidRequest(f"{where}.strict must be true or false", param=f"{where}.strict")
    return Tool(
        name=_name(function.get("name"), f"{where}.name"),
        parameters=_parameters(function.get("parameters"), f"{where}.parameters"),
        description=description,
        strict=bool(strict),
        where=f"{where}.parameters",
    )


def _name(value: Any, where: str) -> str:
    if not isinstance(value, str) or not re.fullmatch(NAME_PATTERN, value):
        raise InvalidRequest(
            f"{where} must be 1 to 64 of the characters a-z, A-Z, 0-9, _, . and -, not {shorten(value)}", param=where
        )
    return value


def _parameters(value: Any, where: str) -> dict[str, Any]:
    """Arguments are always an object; a schema that does not say so is made to."""
    if value is None:
        return {"type": "object", "properties": {}}
    if not isinstance(value, dict):
        raise InvalidRequest(f"{where} must be a JSON schema, not {shorten(value)}", param=where)
    if value.get("type", "object") != "object":
        raise InvalidRequest(
            f'{where}.type must be "object", not {shorten(value["type"])}: arguments have names', param=f"{where}.type"
        )
    check_depth(value, where)
    return {"type": "object"} | value
