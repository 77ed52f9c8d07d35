"""Parsers of calls take steps in proportion to the text, whatever a model writes and however it comes.

A step is a character that is looked at, copied, handed on or read as JSON. So a text twice as long must not cost more
than twice the steps, but for what its ends cost.
"""

import functools
import json
from collections.abc import Iterator
from typing import Any, SupportsIndex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.tools.call_parser import call_parser
from cluster.tools.call_pieces import PieceWriter
from cluster.tools.call_style import CallStyle
from cluster.tools.tool import Tool
from cluster.tools.tool_use import ToolMode, ToolUse

TOOLS = (Tool("weather", {"type": "object"}), Tool("time", {"type": "object"}))
KINDS = ["hermes", "mistral", "llama", "required", "named"]
# Of a text of a certain length, a character is looked at no more often than this.
MOST_STEPS_A_CHARACTER = 40


class Steps:
    """How many characters have been looked at."""

    def __init__(self) -> None:
        self.number = 0


class CountedText(str):
    """A string that counts what is done with it; so does whatever is made of it, but for what `join` makes."""

    steps: Steps

    @classmethod
    def of(cls, text: str, steps: Steps) -> "CountedText":
        counted = cls(text)
        counted.steps = steps
        steps.number += len(text)
        return counted

    def __getitem__(self, key: SupportsIndex | slice) -> str:
        return self.of(super().__getitem__(key), self.steps)

    def __iter__(self) -> Iterator[str]:
        return (self.of(character, self.steps) for character in super().__iter__())

    def __add__(self, other: str) -> str:
        return self.of(str(self) + str(other), self.steps)

    def __radd__(self, other: str) -> str:
        return self.of(str(other) + str(self), self.steps)

    def __contains__(self, part: object) -> bool:
        self.steps.number += len(self)
        return super().__contains__(part)  # type: ignore[operator]

    def find(self, part: str, start: Any = 0, end: Any = None) -> int:
        found = super().find(part, start, end)
        self.steps.number += (len(self) if found < 0 else found + len(part)) - start
        return found

    def strip(self, characters: str | None = None) -> str:
        self.steps.number += len(self)
        return self.of(super().strip(characters), self.steps)

    def lstrip(self, characters: str | None = None) -> str:
        self.steps.number += len(self)
        return self.of(super().lstrip(characters), self.steps)

    def rstrip(self, characters: str | None = None) -> str:
        self.steps.number += len(self)
        return self.of(super().rstrip(characters), self.steps)

    def removesuffix(self, suffix: str) -> str:
        return self.of(super().removesuffix(suffix), self.steps)


def num_steps(kind: str, text: str, monkeypatch: pytest.MonkeyPatch, *, size: int = 0) -> int:
    """The steps that a text takes which comes in pieces of `size` characters; 0: whole."""
    steps = Steps()
    mode = {"required": ToolMode.REQUIRED, "named": ToolMode.NAMED}.get(kind, ToolMode.AUTO)
    style = CallStyle(kind) if mode is ToolMode.AUTO else CallStyle.HERMES
    parser = call_parser(ToolUse(mode, TOOLS, TOOLS[0]), style)
    assert parser is not None
    with monkeypatch.context() as patch:
        # What was joined, and so is not counted any more, is handed on or read as JSON.
        for name in ("content", "arguments", "start"):
            patch.setattr(PieceWriter, name, _counting(getattr(PieceWriter, name), steps))
        patch.setattr(json, "loads", _counting(json.loads, steps))
        size = size or len(text)
        for start in range(0, len(text), size):
            parser.push(CountedText.of(text[start : start + size], steps))
        parser.flush()
    return steps.number


def _counting(function: Any, steps: Steps) -> Any:
    """`function`, with the length of the texts that it is given counted; of texts that count, by themselves too."""

    @functools.wraps(function)
    def counting(*args: Any, **kwargs: Any) -> Any:
        steps.number += sum(len(arg) for arg in args if isinstance(arg, str))
        counted = [CountedText.of(arg, steps) if type(arg) is str else arg for arg in args]
        return function(*counted, **kwargs)

    return counting


def halves(opening: str, closing: str, length: int) -> str:
    """`opening` again and again, then `closing` as often; `length` characters of it, as near as it can be."""
    times = length // (len(opening) + len(closing))
    return opening * times + closing * times


CALL = {
    "hermes": '<tool_call>{"name": "time", "arguments": {}}</tool_call>',
    "mistral": "[TOOL_CALLS]time[ARGS]{}",
    "llama": '{"name": "time", "parameters": {}}; ',
    "required": '[{"name": "time", "parameters": {}}, ',
    "named": "{",
}
# A style; what stands at the beginning; what comes again and again; then what comes as often.
HARD = [
    # Each marker begins a call that only the text's end breaks.
    ("hermes", "", '<tool_call>{"a":{', "}]}"),
    ("hermes", "", '<tool_call>{"a":[\\"', '"<'),
    ("hermes", "", '<tool_call>{"<tool_call>', ""),
    ("mistral", "", '[TOOL_CALLS][{"a":{', "}]}"),
    ("mistral", "", '[TOOL_CALLS][{"a":[\\"', '"]}]'),
    ("mistral", "", '[TOOL_CALLS][{"a":"', '"'),
    ("mistral", "", "[TOOL_CALLS]weather[CALL_ID]", ""),
    ("mistral", "", "[TOOL_CALLS]" + "w" * 64, ""),
    ("mistral", "", "[TOOL_CALLS]" + " " * 100, ""),
    # Calls that are broken or whole, one after the other.
    ("hermes", "", '<tool_call>{"name": "time", oh', ""),
    ("hermes", "", CALL["hermes"], ""),
    ("hermes", CALL["hermes"].removesuffix("</tool_call>"), "<x </tool_", ""),
    ("mistral", "", '[TOOL_CALLS][{"name": "time"} no', ""),
    ("mistral", "", CALL["mistral"], ""),
    ("mistral", '[TOOL_CALLS][{"name": "time"} no', "[TOOL_", ""),
    ("llama", "", CALL["llama"], ""),
    ("llama", CALL["llama"], "<|python_tag|>", ""),
    ("required", "[", CALL["required"].removeprefix("["), ""),
    # White space, which leaves only when something follows it.
    ("hermes", "Hello", "\n", ""),
    ("hermes", CALL["hermes"], "\n", "x"),
    ("mistral", CALL["mistral"], " ", "x\n"),
    ("llama", "", "\n", ""),
    ("llama", CALL["llama"], ";\n", ""),
    ("required", "", " ", ""),
    # Markers that are none.
    ("hermes", "", "<", ""),
    ("hermes", "", "<tool_call", ""),
    ("hermes", "", "</tool_call>", ""),
    ("mistral", "", "[TOOL_CALLS", ""),
    # Long keys, names, values and arguments, before the name and behind it.
    ("hermes", '<tool_call>{"', "k", '"'),
    ("hermes", '<tool_call>{"name": "', "n", ""),
    ("hermes", '<tool_call>{"arguments": {"a": "', "\\n", ""),
    ("hermes", '<tool_call>{"name": "time", "arguments": "', "\\n", ""),
    ("hermes", '<tool_call>{"name": "time", "arguments": ', '{"a":', "}"),
    ("mistral", "[TOOL_CALLS]time[ARGS]", '{"a":', "}"),
    ("llama", '{"name": "', "n", ""),
    ("required", "[{", '"a": "b", ', ""),
    ("named", "", '{"a":', "}"),
]


@pytest.mark.parametrize("size", [0, 1], ids=["whole", "by the character"])
@pytest.mark.parametrize(("kind", "before", "opening", "closing"), HARD)
def test_twice_the_text_takes_twice_the_steps(
    kind: str, before: str, opening: str, closing: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = [
        num_steps(kind, before + halves(opening, closing, length), monkeypatch, size=size)
        for length in (4_000, 8_000, 16_000)
    ]
    assert counts[0] >= 4_000 - len(opening + closing), "the text was looked at"
    assert counts[1] <= 2.2 * counts[0]
    assert counts[2] <= 2.2 * counts[1]


fragments = st.sampled_from(
    [
        "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>", "time", "\n", " ", "{",
        "}", "[", "]", ",", ":", ";", '"', "\\", '\\"', '"name"', '"name": "time"', '"arguments":', "<", "5", "x" * 40,
        *CALL.values(),
    ]
)  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@given(
    opening=st.lists(fragments, min_size=1, max_size=5).map("".join),
    closing=st.lists(fragments, max_size=3).map("".join),
    size=st.sampled_from([0, 1, 7]),
)
def test_no_text_takes_many_steps_a_character(kind: str, opening: str, closing: str, size: int) -> None:
    text = halves(opening, closing, 3_000) + closing
    with pytest.MonkeyPatch.context() as monkeypatch:
        assert num_steps(kind, text, monkeypatch, size=size) <= MOST_STEPS_A_CHARACTER * (len(text) + 100)
