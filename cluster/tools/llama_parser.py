"""Calls as Llama 3 writes them: a message of nothing but JSON objects.

    {"name": "weather", "parameters": {"city": "Paris"}}; {"name": …}

A message may well be JSON that is no call. So it is one only where the name is that of a tool, and only at the
message's beginning (or after `<|python_tag|>`, or another call); from the first other word on all is content.
"""

from enum import Enum

from cluster.tools.call_list import CallList
from cluster.tools.call_object import CallObject, Outcome
from cluster.tools.call_pieces import Piece, PieceWriter
from cluster.tools.call_scan import CallScan

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
        self._kept: list[str] = []  # what stands between calls
        self._tag = ""  # in it: the tag, as far as it has come
        self._has_space = False  # behind the tag
        self._scan = CallScan(CallList(pieces))

    def push(self, text: str) -> list[Piece]:
        for position, character in enumerate(text):
            match self._state:
                case _State.BETWEEN:
                    self._between(character)
                case _State.CALLS:
                    self._in_calls(character)
                case _State.CONTENT:
                    self._pieces.content(text[position:])
                    break
                case _State.BROKEN:
                    break
        return self._pieces.take()

    def flush(self) -> list[Piece]:
        if self._state is _State.CALLS and not self._scan.has_calls:
            self._pieces.content(self._scan.give_up())
        elif self._state is _State.BETWEEN and (self._tag or not self._pieces.num_calls):
            self._pieces.content("".join(self._kept))
        return self._pieces.finish()

    def _between(self, character: str) -> None:
        if character in "{[" and self._tag in ("", TAG):
            self._scan = CallScan(CallList(self._pieces, self._new_object), "".join(self._kept))
            self._state = _State.CALLS
            self._in_calls(character)
            return
        self._kept.append(character)
        if character in _SEPARATORS if self._pieces.num_calls else character.isspace():
            self._has_space = bool(self._tag)
        elif not self._has_space and TAG.startswith(self._tag + character):
            self._tag += character
        else:
            self._pieces.content("".join(self._kept))
            self._state = _State.CONTENT

    def _new_object(self, pieces: PieceWriter) -> CallObject:
        return CallObject(pieces, accepts=self._names.__contains__, known_keys=_KEYS)

    def _in_calls(self, character: str) -> None:
        outcome = self._scan.push(character)
        if outcome is Outcome.GOING:
            return
        if not self._scan.has_calls:
            self._state = _State.CONTENT
            self._pieces.content(self._scan.give_up())
        elif outcome is Outcome.DONE:
            self._state = _State.BETWEEN
            self._kept, self._tag, self._has_space = [], "", False
        else:
            self._state = _State.BROKEN
