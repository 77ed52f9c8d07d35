"""Calls as Mistral's models write them, older and newer.

[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Paris"}}, …]
[TOOL_CALLS]weather[ARGS]{"city": "Paris"}[TOOL_CALLS]…
[TOOL_CALLS]weather[CALL_ID]a1b2c3d4e[ARGS]{"city": "Paris"}
[TOOL_CALLS]weather{"city": "Paris"}
"""

import re

from cluster.tools.call_list import CallList
from cluster.tools.call_object import Outcome
from cluster.tools.call_pieces import PieceWriter
from cluster.tools.json_value import JsonValue, Place
from cluster.tools.marked_parser import MarkedParser

MARKER = "[TOOL_CALLS]"
_ARGS = "[ARGS]"
_CALL_ID = "[CALL_ID]"
_WORD_CHARACTER = re.compile("[a-zA-Z0-9_.-]")
_LONGEST_WORD = 64  # of a name or an id


def mistral_parser(pieces: PieceWriter) -> MarkedParser:
    """See the module."""
    return MarkedParser(pieces, lambda: _Calls(pieces), MARKER)


class _Calls:
    """What follows a marker: an array of calls, or one call whose name stands before its arguments."""

    def __init__(self, pieces: PieceWriter) -> None:
        self._pieces = pieces
        self._head = _Head()
        self._array: CallList | None = None
        self._value: JsonValue | None = None  # the arguments
        self._has_begun_value = False

    @property
    def has_calls(self) -> bool:
        return self._value is not None if self._array is None else self._array.has_calls

    def push(self, character: str) -> Outcome:
        if self._array is not None:
            return self._array.push(character)
        if self._value is not None:
            return self._in_arguments(self._value, character)
        if character == "[" and not self._head.name:
            self._array = CallList(self._pieces)
            return self._array.push(character)
        outcome = self._head.push(character)
        if outcome in (Outcome.GOING, Outcome.BROKEN):
            return outcome
        self._pieces.start(self._head.name)
        self._value = JsonValue()
        return Outcome.GOING if outcome is Outcome.DONE else self._in_arguments(self._value, character)

    def _in_arguments(self, value: JsonValue, character: str) -> Outcome:
        if not self._has_begun_value and character.isspace():
            return Outcome.GOING
        self._has_begun_value = True
        place = value.push(character)
        if place is Place.AFTER:
            return Outcome.OVER
        self._pieces.arguments(character)
        return Outcome.DONE if place is Place.LAST else Outcome.GOING


class _Head:
    """What stands between the marker and the arguments: DONE with the markup before them, OVER at their brace."""

    def __init__(self) -> None:
        self.name = ""
        self._word = ""  # the name, then the id
        self._has_space = False  # behind the word
        self._markup = ""  # the beginning of one
        self._markups: tuple[str, ...] = (_ARGS, _CALL_ID)  # that may come

    def push(self, character: str) -> Outcome:
        if self._markup or (character == "[" and self.name):
            return self._in_markup(character)
        if character == "{" and self.name:
            return Outcome.OVER
        if character.isspace():
            self._has_space = bool(self._word)
            return Outcome.GOING
        if self._has_space or len(self._word) == _LONGEST_WORD or not _WORD_CHARACTER.match(character):
            return Outcome.BROKEN
        self._word += character
        if _CALL_ID in self._markups:
            self.name = self._word
        return Outcome.GOING

    def _in_markup(self, character: str) -> Outcome:
        self._markup += character
        if self._markup == _ARGS:
            return Outcome.DONE
        if self._markup == _CALL_ID and _CALL_ID in self._markups:
            self._markups, self._markup = (_ARGS,), ""
            self._word, self._has_space = "", False
            return Outcome.GOING
        return Outcome.GOING if any(it.startswith(self._markup) for it in self._markups) else Outcome.BROKEN
