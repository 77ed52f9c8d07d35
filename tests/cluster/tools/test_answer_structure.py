"""The grammar of calls or an answer: it takes either, in every style, and its calls are those that parsers read."""

import json
from typing import Any

import llguidance
import pytest
import tokenizers

from cluster.errors import InvalidRequest
from cluster.tools.answer_structure import answer_structure
from cluster.tools.call_parser import call_parser
from cluster.tools.call_pieces import CallStart
from cluster.tools.call_structure import call_structure
from cluster.tools.call_style import CallStyle
from cluster.tools.tool import Tool
from cluster.tools.tool_use import ToolMode, ToolUse
from engine.structure.spec import Structure, StructureKind
from engine.tokenizer.tokenizer import Tokenizer
from gateway_api import embedded_tokenizer

CITY = Tool("city", {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]})
TIME = Tool("time", {"type": "object", "properties": {}, "additionalProperties": False})
AUTO = ToolUse(ToolMode.AUTO, (CITY, TIME))
ANSWER = Structure(
    StructureKind.JSON_SCHEMA,
    json.dumps({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}),
)
CALLS = {
    CallStyle.HERMES: (
        '<tool_call>\n{"name": "city", "arguments": {"name": "Rome"}}\n</tool_call>',
        '\n<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>',
    ),
    CallStyle.LLAMA: ('{"name": "city", "parameters": {"name": "Rome"}}', '; {"name": "time", "parameters": {}}'),
    CallStyle.MISTRAL: (
        '[TOOL_CALLS][{"name": "city", "arguments": {"name": "Rome"}}',
        ', {"name": "time", "arguments": {}}',
    ),
}
SPECIAL = {
    CallStyle.HERMES: ["<tool_call>", "</tool_call>"],
    CallStyle.LLAMA: [],
    CallStyle.MISTRAL: ["[TOOL_CALLS]", "[ARGS]"],
}


def with_special(*tokens: str) -> Tokenizer:
    """The embedded tokenizer with more special tokens."""
    embedded = embedded_tokenizer()
    encoder = tokenizers.Tokenizer.from_str(embedded._encoder.to_str())
    encoder.add_special_tokens(list(tokens))
    return Tokenizer(encoder, embedded.special)


def is_taken(structure: Structure | None, tokenizer: Tokenizer, text: str) -> bool:
    """Whether the grammar takes the text's tokens, and it may end there."""
    assert structure is not None
    assert structure.kind is StructureKind.GRAMMAR
    (eos,) = tokenizer.eos_token_ids
    tokens = llguidance.LLTokenizer(tokenizer._encoder.to_str(), eos_token=eos)
    matcher = llguidance.LLMatcher(tokens, llguidance.LLMatcher.grammar_from_lark(structure.text), log_level=0)
    assert matcher.get_error() == ""
    ids = tokenizer.encode(text, add_special_tokens=False)
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


@pytest.mark.parametrize("style", CallStyle)
@pytest.mark.parametrize("is_special", [False, True])
def test_calls_and_answers_are_taken_and_nothing_else(style: CallStyle, is_special: bool) -> None:
    tokenizer = with_special(*SPECIAL[style]) if is_special else embedded_tokenizer()
    one, more = CALLS[style]
    end = "]" if style is CallStyle.MISTRAL else ""
    if style is CallStyle.MISTRAL and is_special:
        one, more, end = '[TOOL_CALLS]city[ARGS]{"name": "Rome"}', "[TOOL_CALLS]time[ARGS]{}", ""
    structure = answer_structure(AUTO, ANSWER, style, tokenizer)
    single = answer_structure(ToolUse(ToolMode.AUTO, AUTO.tools, is_parallel=False), ANSWER, style, tokenizer)
    assert is_taken(structure, tokenizer, one + end)
    assert is_taken(structure, tokenizer, one + more + end)
    assert is_taken(structure, tokenizer, '{"a": 5}')
    assert is_taken(single, tokenizer, one + end)
    assert not is_taken(single, tokenizer, one + more + end)
    for wrong in (one.replace("Rome", 'Ro"me') + end, one.replace("city", "town") + end, "Hello", '{"a": "x"}', ""):
        assert not is_taken(structure, tokenizer, wrong)
    parser = call_parser(AUTO, style)
    assert parser is not None
    pieces = parser.push(one + more + end) + parser.flush()
    assert [piece.name for piece in pieces if isinstance(piece, CallStart)] == ["city", "time"]


@pytest.mark.parametrize(
    ("content", "taken", "refused"),
    [
        (Structure(StructureKind.JSON_OBJECT), ['{"x": [1]}'], ["[1]", "x"]),
        (Structure(StructureKind.REGEX, "[ab/]+\\/\\d/"), ["ab//5/"], ["ab5", "c/5"]),
        (Structure(StructureKind.REGEX, "a\nb\\\\"), ["a\nb\\"], ["a b", "a\nb"]),
        (Structure.of_choices(["a", "ab", "\b\x00\x7f\u2028🍜"]), ["a", "ab", "\b\x00\x7f\u2028🍜"], ["b"]),
        (Structure.of_choices(["é", 'say "b"\n', "c\\d"]), ["é", 'say "b"\n', "c\\d"], ["e", "say"]),
    ],
)
def test_answer_may_have_any_structure(content: Structure, taken: list[str], refused: list[str]) -> None:
    structure = answer_structure(AUTO, content, CallStyle.HERMES, embedded_tokenizer())
    assert all(is_taken(structure, embedded_tokenizer(), text) for text in taken)
    assert not any(is_taken(structure, embedded_tokenizer(), text) for text in refused)


@pytest.mark.parametrize("style", CallStyle)
def test_answer_that_looks_like_a_call_is_an_answer(style: CallStyle) -> None:
    schema = {"type": "object", "properties": {"name": {"type": "string"}, "parameters": {"type": "integer"}}}
    content = Structure(StructureKind.JSON_SCHEMA, json.dumps(schema))
    structure = answer_structure(AUTO, content, style, embedded_tokenizer())
    for text in ('{"name": "city"}', '{"name": "x", "parameters": 5}', '{"name": "city", "parameters": 5}', "{}"):
        assert is_taken(structure, embedded_tokenizer(), text)


def test_grammar_cannot_be_a_part_of_another() -> None:
    with pytest.raises(InvalidRequest) as caught:
        answer_structure(AUTO, Structure(StructureKind.GRAMMAR, 'start: "x"'), CallStyle.HERMES, embedded_tokenizer())
    assert caught.value.param == "tools"


def test_answers_structure_that_is_none_is_refused() -> None:
    with pytest.raises(InvalidRequest) as caught:
        answer_structure(AUTO, Structure(StructureKind.JSON_SCHEMA, "{"), CallStyle.HERMES, embedded_tokenizer())
    assert caught.value.param == "structure"


@pytest.mark.parametrize("content", [None, ANSWER])
def test_where_a_call_is_demanded_there_is_no_answer(content: Any) -> None:
    use = ToolUse(ToolMode.REQUIRED, AUTO.tools)
    assert answer_structure(use, content, CallStyle.HERMES, embedded_tokenizer()) == call_structure(use)


def test_where_there_are_no_tools_the_answers_structure_is_all() -> None:
    assert answer_structure(ToolUse(), ANSWER, CallStyle.HERMES, embedded_tokenizer()) is ANSWER
    assert answer_structure(AUTO, None, CallStyle.HERMES, embedded_tokenizer()) is None
