"""Calls written as JSON: one object, or an array of them."""

from collections.abc import Callable

from cluster.tools.call_object import CallObject, Outcome
from cluster.tools.call_pieces import PieceWriter


class CallList:
    """The calls of one markup, character by character. `has_calls`: one has begun.

    It is broken by what no such JSON has, and, before any call has begun, by an object that is no call.

    Args:
        new_object: reads one object.
    """

    def __init__(self, pieces: PieceWriter, new_object: Callable[[PieceWriter], CallObject] = CallObject) -> None:
        self.has_calls = False
        self._pieces = pieces
        self._new_object = new_object
        self._object: CallObject | None = None
        self._is_array = False
        self._needs_comma = False

    def push(self, character: str) -> Outcome:
        """Takes the next character, the opening bracket included."""
        if self._object is not None:
            return self._in_object(self._object, character)
        if character.isspace():
            return Outcome.GOING
        if character == "{" and not self._needs_comma:
            self._object = self._new_object(self._pieces)
            return self._in_object(self._object, character)
        if character == "[" and not self._is_array:
            self._is_array = True
        elif character == "," and self._needs_comma:
            self._needs_comma = False
        elif character == "]" and self.has_calls:
            return Outcome.DONE
        else:
            return Outcome.BROKEN
        return Outcome.GOING

    def _in_object(self, call: CallObject, character: str) -> Outcome:
        outcome = call.push(character)
        self.has_calls = self.has_calls or call.is_call
        if outcome is not Outcome.DONE:
            return outcome
        self._object = None
        self._needs_comma = True
        return Outcome.GOING if self._is_array else Outcome.DONE
