"""Calls as Mistral's models write them, older and newer.

[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Paris"}}, …]
[TOOL_CALLS]weather[ARGS]{"city": "Paris"}[TOOL_CALLS]…
[TOOL_CALLS]weather[CALL_ID]a1b2c3d4e[ARGS]{"city": "Paris"}
[TOOL_CALLS]weather{"city": "Paris"}
"""

import re

from cluster.tools.call_list import CallList
from cluster.tools.call_object import Outcome
from cluster.tools.call_pieces import Piece, PieceWriter
from cluster.tools.json_value import JsonValue, Place
from cluster.tools.marker_search import Found, MarkerSearch

MARKER = "[TOOL_CALLS]"
_ARGS = "[ARGS]"
# What may stand between the marker and the arguments; and any beginning of it, short enough to be looked at again with
# every character.
_HEAD = re.compile(r"\s{0,8}([a-zA-Z0-9_.-]{1,64})\s{0,8}(?:\[CALL_ID\][a-zA-Z0-9_-]{0,64}\s{0,8})?(?:\[ARGS\]|(?=\{))")
_HEAD_PARTS = re.compile(
    r"\s{0,8}([a-zA-Z0-9_.-]{1,64}\s{0,8}(\[[A-Z_]{0,7}\]?([a-zA-Z0-9_-]{0,64}\s{0,8}(\[[A-Z_]{0,4})?)?)?)?"
)


class MistralParser:
    """See the module."""

    def __init__(self, pieces: PieceWriter) -> None:
        self._pieces = pieces
        self._search = MarkerSearch(MARKER)
        self._head: str | None = None  # after a marker: what it is the head of is not known yet
        self._calls: CallList | None = None  # an array
        self._raw = ""  # of the array, while nothing in it is a call
        self._value: JsonValue | None = None  # the arguments of a call whose name stands before them
        self._is_broken = False  # what follows is the remains of calls

    def push(self, text: str) -> list[Piece]:
        while text:
            if self._calls is not None:
                text = self._in_array(self._calls, text)
            elif self._value is not None:
                text = self._in_arguments(self._value, text)
            elif self._head is not None:
                text = self._in_head(self._head, text)
            else:
                text = self._in_content(text)
        return self._pieces.take()

    def flush(self) -> list[Piece]:
        if self._head is not None:
            self._pieces.content(MARKER + self._head)
        elif self._calls is not None and not self._calls.has_calls:
            self._pieces.content(MARKER + self._raw)
        self._say(self._search.flush())
        return self._pieces.finish()

    def _say(self, text: str) -> None:
        if not self._is_broken:
            self._pieces.content(text)

    def _in_content(self, text: str) -> str:
        found = self._search.push(text)
        if not isinstance(found, Found):
            self._say(found)
            return ""
        self._say(found.before)
        self._is_broken = False
        self._head = ""
        return found.after

    def _in_head(self, head: str, text: str) -> str:
        for position, character in enumerate(text):
            head += character
            if head.lstrip().startswith("["):
                self._head, self._calls, self._raw = None, CallList(self._pieces), ""
                return head + text[position + 1 :]
            if match := _HEAD.match(head):
                self._head, self._value = None, JsonValue()
                self._pieces.start(match[1])
                return head[match.end() :] + text[position + 1 :]
            if not _HEAD_PARTS.fullmatch(head):
                # It was no call: the marker is content, and what follows it is looked at anew.
                self._head = None
                self._pieces.content(MARKER)
                return head + text[position + 1 :]
        self._head = head
        return ""

    def _in_array(self, calls: CallList, text: str) -> str:
        for position, character in enumerate(text):
            outcome = calls.push(character)
            if not calls.has_calls:
                self._raw += character
            if outcome is Outcome.GOING:
                continue
            self._calls = None
            if not calls.has_calls:
                self._pieces.content(MARKER)
                return self._raw + text[position + 1 :]
            self._is_broken = outcome is Outcome.BROKEN
            return text[position + (0 if self._is_broken else 1) :]
        return ""

    def _in_arguments(self, value: JsonValue, text: str) -> str:
        for position, character in enumerate(text):
            place = value.push(character)
            if place is not Place.INSIDE:
                end = position + (1 if place is Place.LAST else 0)
                self._value = None
                self._pieces.arguments(text[:end])
                return text[end:]
        self._pieces.arguments(text)
        return ""
