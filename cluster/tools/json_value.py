"""Where a JSON value ends, in a text that comes character by character.

Only strings and brackets are followed: whether what is between them is JSON, whoever reads the value will find out.
"""

from enum import Enum


class Place(Enum):
    """Where a character stands."""

    INSIDE = "inside"  # it is the value's, and the value goes on
    LAST = "last"  # it ends the value
    AFTER = "after"  # the value had ended before it


class JsonValue:
    """One value, from its first character that is no white space.

    Args:
        forbidden: characters that no JSON has outside of a string: where one comes, the value has broken off.
    """

    def __init__(self, forbidden: str = "") -> None:
        self._forbidden = forbidden
        self._depth = 0
        self._is_string = False
        self._is_escaped = False
        self._is_begun = False

    def push(self, character: str) -> Place:
        """Takes the next character. After LAST or AFTER none may come."""
        if self._is_string:
            return self._in_string(character)
        is_scalar = self._is_begun and self._depth == 0
        self._is_begun = True
        if character in self._forbidden or (is_scalar and (character in '"[{,' or character.isspace())):
            return Place.AFTER
        if character in "]}":
            self._depth -= 1
            return Place.AFTER if self._depth < 0 else Place.LAST if self._depth == 0 else Place.INSIDE
        if character == '"':
            self._is_string = True
        elif character in "[{":
            self._depth += 1
        return Place.INSIDE

    def _in_string(self, character: str) -> Place:
        if self._is_escaped:
            self._is_escaped = False
        elif character == "\\":
            self._is_escaped = True
        elif character == '"':
            self._is_string = False
            return Place.LAST if self._depth == 0 else Place.INSIDE
        return Place.INSIDE
