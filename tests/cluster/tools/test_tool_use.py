"""`tools`, `tool_choice` and `parallel_tool_calls`: what they mean, and how they are refused."""

from typing import Any

import pytest

from cluster.errors import InvalidRequest
from cluster.tools.tool import Tool, parse_tools
from cluster.tools.tool_use import ToolMode, ToolUse, parse_tool_use

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}


def tool(name: str = "f", **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **function}}


F, G = Tool("f", {"type": "object", "properties": {}}), Tool("g", {"type": "object", "properties": {}})
BOTH = [tool("f"), tool("g")]


def test_tool_keeps_what_templates_tell_the_model() -> None:
    (parsed,) = parse_tools([tool(description="Tells.", parameters=SCHEMA, strict=True) | {"extra": 1}])
    assert parsed == Tool("f", SCHEMA, "Tells.", strict=True)
    assert parsed.json() == tool(description="Tells.", parameters=SCHEMA)


def test_tool_without_parameters_takes_none() -> None:
    (parsed,) = parse_tools([tool()])
    assert parsed.json() == tool(parameters={"type": "object", "properties": {}})


def test_parameters_are_of_an_object_though_they_do_not_say_so() -> None:
    (parsed,) = parse_tools([tool(parameters={"properties": {}})])
    assert parsed.parameters == {"type": "object", "properties": {}}


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        (5, "tools"),
        ({}, "tools"),
        ([5], "tools[0]"),
        ([tool(), {}], "tools[1].type"),
        ([{"type": "custom", "custom": {"name": "f"}}], "tools[0].type"),
        ([{"type": "function"}], "tools[0].function"),
        ([{"type": "function", "function": {}}], "tools[0].function.name"),
        ([tool("")], "tools[0].function.name"),
        ([tool("a b")], "tools[0].function.name"),
        ([tool("x" * 65)], "tools[0].function.name"),
        ([tool("f\n")], "tools[0].function.name"),
        ([tool(), tool()], "tools[1].function.name"),
        ([tool(description=5)], "tools[0].function.description"),
        ([tool(strict="yes")], "tools[0].function.strict"),
        ([tool(parameters=[])], "tools[0].function.parameters"),
        ([tool(parameters={"type": "string"})], "tools[0].function.parameters.type"),
        ([tool(f"f{number}") for number in range(129)], "tools"),
    ],
)
def test_tool_that_is_none_is_refused_by_its_place(tools: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_tools(tools)
    assert caught.value.param == param
    assert param in caught.value.message


@pytest.mark.parametrize(
    ("fields", "use"),
    [
        ({}, ToolUse()),
        ({"tools": []}, ToolUse()),
        ({"tools": [], "tool_choice": "none"}, ToolUse()),
        ({"tool_choice": "auto"}, ToolUse()),
        ({"tools": BOTH}, ToolUse(ToolMode.AUTO, (F, G))),
        ({"tools": BOTH, "tool_choice": "auto"}, ToolUse(ToolMode.AUTO, (F, G))),
        ({"tools": BOTH, "tool_choice": "none"}, ToolUse()),
        ({"tools": BOTH, "tool_choice": "required"}, ToolUse(ToolMode.REQUIRED, (F, G))),
        ({"tools": BOTH, "parallel_tool_calls": False}, ToolUse(ToolMode.AUTO, (F, G), is_parallel=False)),
        ({"tools": BOTH, "tool_choice": tool("g")}, ToolUse(ToolMode.NAMED, (F, G), G, is_parallel=False)),
        (
            {
                "tools": BOTH,
                "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [tool("g")]}},
            },
            ToolUse(ToolMode.REQUIRED, (G,)),
        ),
    ],
)
def test_choice_says_what_the_model_may(fields: dict[str, Any], use: ToolUse) -> None:
    assert parse_tool_use(**fields) == use


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": tool("f")}, "tool_choice"),
        ({"tools": BOTH, "tool_choice": "any"}, "tool_choice"),
        ({"tools": BOTH, "tool_choice": 5}, "tool_choice"),
        ({"tools": BOTH, "tool_choice": {}}, "tool_choice"),
        ({"tools": BOTH, "tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tools": BOTH, "tool_choice": tool("h")}, "tool_choice.function.name"),
        ({"tools": BOTH, "tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools"),
        (
            {"tools": BOTH, "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "x"}}},
            "tool_choice.allowed_tools.mode",
        ),
        (
            {"tools": BOTH, "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}},
            "tool_choice.allowed_tools.tools",
        ),
        (
            {
                "tools": BOTH,
                "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [tool("h")]}},
            },
            "tool_choice.allowed_tools.tools[0].function.name",
        ),
        ({"tools": BOTH, "parallel_tool_calls": "no"}, "parallel_tool_calls"),
    ],
)
def test_choice_that_is_none_is_refused_by_its_field(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_tool_use(**fields)
    assert caught.value.param == param
