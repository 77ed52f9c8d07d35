"""Parsers of calls: one suite over every way to write them, and each way's own habits."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.tools.call_parser import call_parser
from cluster.tools.call_pieces import Content
from cluster.tools.call_style import CallStyle
from cluster.tools.tool_use import ToolMode, ToolUse
from parsed_calls import TOOLS, calls_of, content_of, parse

PARIS = '{"city": "Paris"}'


def hermes(*calls: tuple[str, str]) -> str:
    return "\n".join(
        f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>' for name, arguments in calls
    )


def hermes_array(*calls: tuple[str, str]) -> str:
    inside = ", ".join(f'{{"name": "{name}", "arguments": {arguments}}}' for name, arguments in calls)
    return f"<tool_call>[{inside}]</tool_call>"


def mistral_array(*calls: tuple[str, str]) -> str:
    inside = ", ".join(f'{{"name": "{name}", "arguments": {arguments}}}' for name, arguments in calls)
    return f"[TOOL_CALLS] [{inside}]"


def mistral_named(*calls: tuple[str, str]) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{arguments}" for name, arguments in calls)


def mistral_with_ids(*calls: tuple[str, str]) -> str:
    return "".join(f"[TOOL_CALLS]{name}[CALL_ID]a1B2c3D4e[ARGS]{arguments}" for name, arguments in calls)


def mistral_bare(*calls: tuple[str, str]) -> str:
    return "".join(f"[TOOL_CALLS]{name}{arguments}" for name, arguments in calls)


def llama(*calls: tuple[str, str]) -> str:
    return "; ".join(f'{{"name": "{name}", "parameters": {arguments}}}' for name, arguments in calls)


def llama_tagged(*calls: tuple[str, str]) -> str:
    return "<|python_tag|>" + llama(*calls)


def required(*calls: tuple[str, str]) -> str:
    return "[" + ", ".join(f'{{"name": "{name}", "parameters": {arguments}}}' for name, arguments in calls) + "]"


Writer = Callable[..., str]
WRITERS: list[tuple[str, Writer]] = [
    ("hermes", hermes),
    ("hermes", hermes_array),
    ("mistral", mistral_array),
    ("mistral", mistral_named),
    ("mistral", mistral_with_ids),
    ("mistral", mistral_bare),
    ("llama", llama),
    ("llama", llama_tagged),
    ("required", required),
]
every_way = pytest.mark.parametrize(("kind", "write"), WRITERS, ids=[write.__name__ for _, write in WRITERS])
KINDS = ["hermes", "mistral", "llama", "required", "named"]


@every_way
@pytest.mark.parametrize(
    "calls",
    [
        [("weather", PARIS)],
        [("weather", "{}")],
        [("weather", PARIS), ("time", '{"zone": "CET", "at": [1, {"x": null}], "é": "\\u00e9\\"}]<"}')],
        [("time", '{"code": "</tool_call> [TOOL_CALLS] {\\\\"}'), ("time", "{}"), ("weather", PARIS)],
        [("weather", '{\n  "city" : "Paris"\n}')],
    ],
)
def test_calls_are_found_with_their_arguments_as_written(
    kind: str, write: Writer, calls: list[tuple[str, str]]
) -> None:
    pieces = parse(kind, write(*calls))
    assert calls_of(pieces) == calls
    assert content_of(pieces) == ""
    for _, arguments in calls_of(pieces):
        json.loads(arguments)


@every_way
def test_arguments_come_while_they_are_written(kind: str, write: Writer) -> None:
    text = write(("weather", PARIS))
    end = text.index("Par") + 3
    mode = ToolMode.REQUIRED if kind == "required" else ToolMode.AUTO
    style = CallStyle(kind) if mode is ToolMode.AUTO else CallStyle.HERMES
    parser = call_parser(ToolUse(mode, TOOLS), style)
    assert parser is not None
    assert calls_of(parser.push(text[:end])) == [("weather", '{"city": "Par')]


@every_way
def test_call_that_is_cut_off_in_its_arguments_keeps_what_came(kind: str, write: Writer) -> None:
    text = write(("time", "{}"), ("weather", PARIS))
    pieces = parse(kind, text[: text.index("Par") + 3])
    assert calls_of(pieces) == [("time", "{}"), ("weather", '{"city": "Par')]
    assert content_of(pieces) == ""


@every_way
def test_second_call_is_left_out_when_calls_are_not_parallel(kind: str, write: Writer) -> None:
    pieces = parse(kind, write(("weather", PARIS), ("time", "{}")), is_parallel=False)
    assert calls_of(pieces) == [("weather", PARIS)]
    assert content_of(pieces) == ""


@pytest.mark.parametrize(("kind", "write"), [way for way in WRITERS if way[0] in ("hermes", "mistral")])
@pytest.mark.parametrize("before", ["I'll look.", " Let me see:\n\n", "a < b [TOOL] <tool_", "é🍜 "])
def test_words_before_calls_are_content_without_the_space_that_touches_them(
    kind: str, write: Writer, before: str
) -> None:
    pieces = parse(kind, before + write(("weather", PARIS)))
    assert pieces[0] == Content(before.rstrip())
    assert calls_of(pieces) == [("weather", PARIS)]


PLAIN = [
    "",
    " ",
    "Hello, world.\n",
    "a <tool_call without its end",
    "<tool_call>",
    "<tool_call> no JSON",
    "<tool_call>{}</tool_call>",
    '<tool_call>{"arguments": {"city": "Paris"}}</tool_call>',
    '<tool_call>{"name": 5, "arguments": {}}</tool_call>',
    '<tool_call>{"name": "", "arguments": {}}</tool_call>',
    '<tool_call>{"na',
    "<tool_call>[]</tool_call>",
    "[TOOL_CALLS]",
    "[TOOL_CALLS]weather",
    "[TOOL_CALLS]weather Paris",
    "[TOOL_CALLS]weather[FOO",
    "[TOOL_CALLS][1, 2]",
    "[TOOL_CALLS]{}",
    "[TOOL_CALL",
    '{"name": "Bob", "parameters": {}}',
    '{"city": "Paris", "name": "weather"}',
    "[1, 2, 3]",
    '{"a',
    "[see](there)",
    "<|python_tag|>print(1)",
    "<|python_ta",
    " { } ",
    "{",
]


@pytest.mark.parametrize("kind", ["hermes", "mistral", "llama"])
@pytest.mark.parametrize("text", PLAIN)
def test_text_that_only_looks_like_a_call_is_content_word_for_word(kind: str, text: str) -> None:
    assert parse(kind, text) == ([Content(text)] if text else [])


@pytest.mark.parametrize(
    ("kind", "text", "calls", "content"),
    [
        # The model forgets a closing tag, or a brace.
        ("hermes", '<tool_call>{"name": "time", "arguments": {}}\nDone.', [("time", "{}")], "Done."),
        ("hermes", '<tool_call>{"name": "time", "arguments": {"a": 1}\n</tool_call> ok', [("time", '{"a": 1}')], "ok"),
        ("hermes", '<tool_call>{"name": "time", "arguments": {"a": 1</tool_call>ok', [("time", '{"a": 1')], "ok"),
        ("hermes", '<tool_call>{"name": "time", "arguments": {}}}</tool_call>', [("time", "{}")], ""),
        (
            "hermes",
            '<tool_call>{"name": "time", "arguments": {}}<tool_call>{"name": "time"}</tool_call>',
            [("time", "{}"), ("time", "{}")],
            "",
        ),
        ("hermes", '<tool_call><tool_call>{"name": "time"}</tool_call>', [("time", "{}")], "<tool_call>"),
        ("hermes", '<tool_call>{"name": "time", "arguments": {"a": x y}}</tool_call>', [("time", '{"a": x y}')], ""),
        ("hermes", '<tool_call>{"name": "time", oh</tool_call>no', [("time", "")], "no"),
        # Arguments before the name, as a string, of nothing, twice; other keys.
        ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "time"}</tool_call>', [("time", '{"a": 1}')], ""),
        (
            "hermes",
            '<tool_call>{"name": "time", "arguments": "{\\"a\\": 1}"}</tool_call>',
            [("time", '{"a": 1}')],
            "",
        ),
        ("hermes", '<tool_call>{"name": "time", "arguments": null}</tool_call>', [("time", "{}")], ""),
        ("hermes", '<tool_call>{"id": [1, "}"], "name": "time", "x": 5}</tool_call>', [("time", "{}")], ""),
        ("hermes", '<tool_call>{"name": "time", "arguments": {}, "arguments": {"b": 1}}', [("time", "{}")], ""),
        ("hermes", '<tool_call>{"name": "t\\u0069me"}</tool_call>', [("time", "{}")], ""),
        ("hermes", hermes(("time", "{}")) + "\n\n and so on ", [("time", "{}")], "and so on "),
        ("mistral", '[TOOL_CALLS][{"name": "time", "arguments": {}} no', [("time", "{}")], ""),
        ("mistral", "[TOOL_CALLS]time[ARGS]{} and so on", [("time", "{}")], "and so on"),
        ("mistral", '[TOOL_CALLS] time [CALL_ID]a-1 [ARGS] {"a": 1}', [("time", '{"a": 1}')], ""),
        ("mistral", "[TOOL_CALLS]time[ARGS]5 o'clock", [("time", "5")], "o'clock"),
        # A call that is begun anew before its name is complete, in a string as well.
        (
            "hermes",
            '<tool_call>{"arguments": {"a": "<tool_call>{"name": "time"}',
            [("time", "{}")],
            '<tool_call>{"arguments": {"a": "',
        ),
        ("mistral", '[TOOL_CALLS][{"a": [TOOL_CALLS]time{}', [("time", "{}")], '[TOOL_CALLS][{"a":'),
        ("mistral", "[TOOL_CALLS][[TOOL_CALLS]time{}", [("time", "{}")], "[TOOL_CALLS]["),
        # Once it is complete, a marker in a string is the string's.
        (
            "hermes",
            '<tool_call>{"name": "time", "arguments": {"a": "<tool_call>"}}',
            [("time", '{"a": "<tool_call>"}')],
            "",
        ),
        ("mistral", "[TOOL_CALLS][TOOL_CALLS]time{}", [("time", "{}")], "[TOOL_CALLS]"),
        ("llama", '{"type": "function", "name": "time", "parameters": {}}', [("time", "{}")], ""),
        ("llama", ' \n{"name": "time", "parameters": {}}\n', [("time", "{}")], ""),
        ("llama", '{"name": "time", "parameters": {}} Done.', [("time", "{}")], "Done."),
        ("llama", '[{"name": "time", "parameters": {}}, {"name": "weather"}]', [("time", "{}"), ("weather", "{}")], ""),
        ("llama", 'Sure: {"name": "time", "parameters": {}}', [], 'Sure: {"name": "time", "parameters": {}}'),
        ("required", '[{"na', [], '[{"na'),
        ("required", "Hello, world.", [], "Hello, world."),
        ("required", '[{"name": "time"}] Done.', [("time", "{}")], ""),
        ("named", '{"city": "Par', [("weather", '{"city": "Par')], ""),
        ("named", PARIS, [("weather", PARIS)], ""),
        ("named", "", [], ""),
    ],
)
def test_habits_of_models(kind: str, text: str, calls: list[tuple[str, str]], content: str) -> None:
    pieces = parse(kind, text)
    assert (calls_of(pieces), content_of(pieces)) == (calls, content)


def test_arguments_before_the_name_may_be_as_deep_as_they_like() -> None:
    arguments = '{"a":' * 50_000 + "5" + "}" * 50_000
    assert calls_of(parse("hermes", f'<tool_call>{{"arguments": {arguments}, "name": "time"}}')) == [
        ("time", arguments)
    ]


def test_half_a_surrogate_pair_is_no_name_and_leaves_arguments_as_written() -> None:
    text = r'<tool_call>{"name": "\ud800"}</tool_call>'
    assert parse("hermes", text) == [Content(text)]
    pieces = parse("hermes", r'<tool_call>{"name": "time", "arguments": "\ud800"}</tool_call>')
    assert calls_of(pieces) == [("time", r'"\ud800"')]


def test_no_parser_is_needed_where_there_are_no_tools() -> None:
    assert call_parser(ToolUse(), CallStyle.HERMES) is None


fragments = st.sampled_from(
    [
        "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>", "weather", "time", "\n",
        " ", "{", "}", "[", "]", ",", ":", ";", '"', "\\", '"name"', '"arguments"', '"parameters"', '{"name": "time", ',
        '"arguments": {', '{"name": "weather", "parameters": {"a": "b"}}', hermes(("time", "{}")), "null", "5", "é",
        "<", "hello",
    ]
)  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@given(parts=st.lists(fragments, max_size=14), data=st.data())
def test_pieces_do_not_depend_on_how_the_text_was_cut(kind: str, parts: list[str], data: Any) -> None:
    text = "".join(parts)
    whole = parse(kind, text)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=6)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert parse(kind, *pieces) == whole
    assert parse(kind, *text) == whole
    if not calls_of(whole):
        assert content_of(whole) == text


@pytest.mark.parametrize("kind", ["hermes", "mistral", "llama"])
@given(parts=st.lists(fragments, max_size=14))
def test_every_character_of_content_was_in_the_text_in_that_order(kind: str, parts: list[str]) -> None:
    text = "".join(parts)
    rest = iter(text)
    assert all(character in rest for character in content_of(parse(kind, text)))
