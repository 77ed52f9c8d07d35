"""The grammar of a demanded call: it takes calls, and nothing else."""

import json
from typing import Any

import llguidance
import pytest

from cluster.tools.call_structure import call_structure
from cluster.tools.tool import Tool
from cluster.tools.tool_use import ToolMode, ToolUse
from engine.structure.spec import Structure, StructureKind

CITY = Tool("city", {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]})
# A reference means the schema that it stands in, not its neighbour's.
TREE = Tool("tree", {"type": "object", "properties": {"a": {"$ref": "#/$defs/x"}}, "$defs": {"x": {"type": "integer"}}})
FLAG = Tool("flag", {"type": "object", "properties": {"a": {"$ref": "#/$defs/x"}}, "$defs": {"x": {"type": "boolean"}}})
TOOLS = (CITY, TREE, FLAG)


def is_taken(structure: Structure, text: str) -> bool:
    """Whether the grammar takes the text, and it may end there."""
    assert structure.kind is StructureKind.GRAMMAR
    tokenizer = llguidance.LLTokenizer("byte")
    matcher = llguidance.LLMatcher(tokenizer, llguidance.LLMatcher.grammar_from_lark(structure.text), log_level=0)
    assert matcher.get_error() == ""
    tokens = tokenizer.tokenize_bytes(text.encode())
    return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())


def structure_of(mode: ToolMode, **fields: Any) -> Structure:
    structure = call_structure(ToolUse(mode, TOOLS, **fields))
    assert structure is not None
    return structure


def call(name: str, /, **arguments: Any) -> str:
    return f'{{"name": "{name}", "parameters": {json.dumps(arguments)}}}'


@pytest.mark.parametrize(
    ("text", "taken"),
    [
        (f"[{call('city', name='Paris')}]", True),
        (f"[{call('city', name='Paris')}, {call('tree', a=5)}, {call('flag', a=True)}]", True),
        (f"[{call('tree', a=True)}]", False),
        (f"[{call('flag', a=5)}]", False),
        (f"[{call('city')}]", False),
        (f"[{call('town', name='Paris')}]", False),
        (f"[ {call('city', name='Paris')}]", False),
        ('[{"name": "city", "parameters": {\n"name": "Paris"}}]', False),
        ("[]", False),
        ("Hello", False),
    ],
)
def test_required_calls_are_one_of_the_tools_each(text: str, taken: bool) -> None:
    assert is_taken(structure_of(ToolMode.REQUIRED), text) is taken


def test_one_call_is_the_most_when_they_are_not_parallel() -> None:
    structure = structure_of(ToolMode.REQUIRED, is_parallel=False)
    assert is_taken(structure, f"[{call('city', name='x')}]")
    assert not is_taken(structure, f"[{call('city', name='x')}, {call('city', name='x')}]")


@pytest.mark.parametrize(
    ("text", "taken"), [('{"name": "Paris"}', True), ("{}", False), ('{"name": 5}', False), ("Paris", False)]
)
def test_named_function_gets_its_arguments_and_nothing_else(text: str, taken: bool) -> None:
    assert is_taken(structure_of(ToolMode.NAMED, named=CITY), text) is taken


@pytest.mark.parametrize("mode", [ToolMode.NONE, ToolMode.AUTO])
def test_model_that_is_free_is_held_to_nothing(mode: ToolMode) -> None:
    assert call_structure(ToolUse(mode, TOOLS)) is None


def test_quotes_in_a_schema_stay_what_they_are() -> None:
    odd = Tool("odd", {"type": "object", "properties": {'a"\n\\': {"const": 'b"é\n'}}, "required": ['a"\n\\']})
    structure = call_structure(ToolUse(ToolMode.NAMED, (odd,), odd))
    assert structure is not None
    assert is_taken(structure, '{"a\\"\\n\\\\": "b\\"é\\n"}')
