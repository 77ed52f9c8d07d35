"""Calls as Llama 3 writes them: a message of nothing but JSON objects.

    {"name": "weather", "parameters": {"city": "Paris"}}; {"name": …}

A message may well be JSON that is no call. So it is one only where the name is that of a tool, and only at the
message's beginning (or after `<|python_tag|>`, or another call); from the first other word on all is content.
"""

from enum import Enum

from cluster.tools.call_list import CallList
from cluster.tools.call_object import CallObject, Outcome
from cluster.tools.call_pieces import Piece, PieceWriter

TAG = "<|python_tag|>"
_SEPARATORS = " \t\r\n;"  # between calls
_KEYS = frozenset({"type", "id", "name", "arguments", "parameters"})


class _State(Enum):
    BETWEEN = "between"  # where a call may begin
    CALLS = "calls"
    CONTENT = "content"
    BROKEN = "broken"  # the remains of a call


class LlamaParser:
    """See the module. `names` are those of the tools."""

    def __init__(self, pieces: PieceWriter, names: frozenset[str]) -> None:
        self._pieces = pieces
        self._names = names
        self._state = _State.BETWEEN
        self._raw = ""  # what has been seen since it last was clear what it is
        self._calls = CallList(pieces)

    def push(self, text: str) -> list[Piece]:
        while text:
            match self._state:
                case _State.BETWEEN:
                    text = self._between(text)
                case _State.CALLS:
                    text = self._in_calls(text)
                case _State.CONTENT:
                    self._pieces.content(text)
                    text = ""
                case _State.BROKEN:
                    text = ""
        return self._pieces.take()

    def flush(self) -> list[Piece]:
        is_call = self._state is _State.CALLS and self._calls.has_calls
        is_separator = self._pieces.num_calls > 0 and not self._raw.strip(_SEPARATORS)
        if not is_call and not is_separator:
            self._pieces.content(self._raw)
        return self._pieces.finish()

    def _between(self, text: str) -> str:
        for position, character in enumerate(text):
            self._raw += character
            seen = self._raw.strip(_SEPARATORS if self._pieces.num_calls else None)
            if TAG.startswith(seen):
                continue
            if seen.removeprefix(TAG).lstrip() in ("{", "["):
                self._state = _State.CALLS
                self._calls = CallList(self._pieces, self._new_object)
                self._raw = self._raw[:-1]
                return character + text[position + 1 :]
            self._state = _State.CONTENT
            self._pieces.content(self._raw)
            self._raw = ""
            return text[position + 1 :]
        return ""

    def _new_object(self, pieces: PieceWriter) -> CallObject:
        return CallObject(pieces, accepts=self._names.__contains__, known_keys=_KEYS)

    def _in_calls(self, text: str) -> str:
        for position, character in enumerate(text):
            outcome = self._calls.push(character)
            if not self._calls.has_calls:
                self._raw += character
            if outcome is Outcome.GOING:
                continue
            if not self._calls.has_calls:
                self._state = _State.CONTENT
                self._pieces.content(self._raw)
            else:
                self._state = _State.BETWEEN if outcome is Outcome.DONE else _State.BROKEN
            self._raw = ""
            return text[position + 1 :]
        return ""
