"""A call written as a JSON object, as it comes: `{"name": "weather", "arguments": {"city": "Paris"}}`.

    {"name": "weather", "arguments": {"city": "Paris"}}
                      ^ the call begins: its name is complete
                                     ^^^^^^^^^^^^^^^^^ its arguments, let out as they come

What breaks before the name is complete was no call. What breaks after it leaves a call with the arguments so far.
Arguments are handed on as the model wrote them. Some models write them as a string that holds JSON; that is opened, and
so waited for. Arguments that stand before the name wait for it.
"""

import json
from collections.abc import Callable
from enum import Enum

from cluster.tools.call_pieces import PieceWriter
from cluster.tools.json_value import JsonValue, Place

_NAME = "name"
_ARGUMENTS = ("arguments", "parameters")


class Outcome(Enum):
    """What has become of the object with a character."""

    GOING = "going"
    DONE = "done"  # with this character
    BROKEN = "broken"  # by this character, which is no part of it
    OVER = "over"  # it was whole before this character, which is no part of it


class _Expects(Enum):
    OPENING = "opening"
    KEY = "key"
    KEY_END = "key end"
    COLON = "colon"
    VALUE = "value"
    VALUE_END = "value end"
    COMMA = "comma"


class CallObject:
    """One object. `is_call`: a name is complete, and the call has begun.

    Args:
        accepts: whether there is a call of this name; any other was none.
        known_keys: an object that has another key before its name was none; None: any may have.
        forbidden: see `JsonValue`.
    """

    def __init__(
        self,
        pieces: PieceWriter,
        *,
        accepts: Callable[[str], bool] = lambda name: True,
        known_keys: frozenset[str] | None = None,
        forbidden: str = "",
    ) -> None:
        self.is_call = False
        self._pieces = pieces
        self._accepts = accepts
        self._known_keys = known_keys
        self._forbidden = forbidden
        self._expects = _Expects.OPENING
        self._value = JsonValue()
        self._raw: list[str] = []  # of the key or value that is being read, if it is kept
        self._key = ""
        self._is_streamed = False  # the arguments being read are let out as they come
        self._waiting: str | None = None  # arguments that came before the name
        self._has_arguments = False

    def push(self, character: str) -> Outcome:
        """Takes the next character, the opening brace included."""
        if self._expects in (_Expects.KEY_END, _Expects.VALUE_END):
            return self._in_value(character)
        if character.isspace():
            return Outcome.GOING
        match self._expects, character:
            case _Expects.OPENING, "{":
                self._expects = _Expects.KEY
            case _Expects.KEY, '"':
                self._begin(_Expects.KEY_END, character)
            case _Expects.COLON, ":":
                self._expects = _Expects.VALUE
            case _Expects.COMMA, ",":
                self._expects = _Expects.KEY
            case ((_Expects.KEY | _Expects.COMMA), "}"):
                return self._end()
            case _Expects.VALUE, _ if character not in ",]}" + self._forbidden:
                self._is_streamed = self._is_arguments and self.is_call and character == "{"
                self._begin(_Expects.VALUE_END, character)
            case _:
                return Outcome.BROKEN
        return Outcome.GOING

    @property
    def _is_arguments(self) -> bool:
        return self._key in _ARGUMENTS and not self._has_arguments

    def _begin(self, expects: _Expects, character: str) -> None:
        self._expects = expects
        self._raw = []
        self._value = JsonValue(self._forbidden)
        self._value.push(character)
        self._keep(character)

    def _keep(self, character: str) -> None:
        if self._is_streamed:
            self._pieces.arguments(character)
        else:
            self._raw.append(character)

    def _in_value(self, character: str) -> Outcome:
        place = self._value.push(character)
        if place is not Place.AFTER:
            self._keep(character)
        if place is Place.INSIDE:
            return Outcome.GOING
        is_sound = self._key_ended() if self._expects is _Expects.KEY_END else self._value_ended()
        if not is_sound:
            return Outcome.BROKEN
        return self.push(character) if place is Place.AFTER else Outcome.GOING

    def _key_ended(self) -> bool:
        key = _text("".join(self._raw))
        if key is None or (self._known_keys is not None and not self.is_call and key not in self._known_keys):
            return False
        self._key = key
        self._expects = _Expects.COLON
        return True

    def _value_ended(self) -> bool:
        self._expects = _Expects.COMMA
        if self._is_streamed:
            self._is_streamed = False
            self._has_arguments = True
        elif self._is_arguments:
            self._has_arguments = True
            self._waiting = _arguments("".join(self._raw))
            if self.is_call:
                self._let_go()
        elif self._key == _NAME and not self.is_call:
            name = _text("".join(self._raw))
            if not name or not self._accepts(name):
                return False
            self.is_call = True
            self._pieces.start(name)
            self._let_go()
        return True

    def _let_go(self) -> None:
        if self._waiting is not None:
            self._pieces.arguments(self._waiting)
            self._waiting = None

    def _end(self) -> Outcome:
        if not self.is_call:
            return Outcome.BROKEN
        if not self._has_arguments:
            self._pieces.arguments("{}")
        return Outcome.DONE


def _text(raw: str) -> str | None:
    """A JSON string's text; None, if it is none, or holds half a surrogate pair, which is no character."""
    if not raw.startswith('"'):
        return None
    try:
        text = str(json.loads(raw, strict=False))
        text.encode()
    except ValueError:
        return None
    return text


def _arguments(raw: str) -> str:
    """Arguments that are no object as they were written: none, or a string that holds them."""
    if raw == "null":
        return "{}"
    text = _text(raw)
    return raw if text is None else text
