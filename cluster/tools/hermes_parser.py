"""Calls as Hermes, Qwen and SmolLM write them.

    I'll look.<tool_call>
    {"name": "weather", "arguments": {"city": "Paris"}}
    </tool_call>

Between the tags stands one call, or an array of them. A closing tag that was forgotten is not missed: the next call
begins at its opening tag, and other text is content. Between a call's JSON and its closing tag nothing counts.
"""

from cluster.tools.call_list import CallList
from cluster.tools.call_object import CallObject, Outcome
from cluster.tools.call_pieces import Piece, PieceWriter
from cluster.tools.marker_search import Found, MarkerSearch

OPEN = "<tool_call>"
CLOSE = "</tool_call>"


def _new_object(pieces: PieceWriter) -> CallObject:
    # No JSON has < outside of a string: there the closing tag begins, however many braces are missing.
    return CallObject(pieces, forbidden="<")


class HermesParser:
    """See the module."""

    def __init__(self, pieces: PieceWriter) -> None:
        self._pieces = pieces
        self._open = MarkerSearch(OPEN)
        self._calls: CallList | None = None  # between an opening tag and the end of its JSON
        self._raw = ""  # what stands there, while nothing in it is a call
        self._close: MarkerSearch | None = None  # after the JSON
        self._rest = ""  # what stands there
        self._is_broken = False

    def push(self, text: str) -> list[Piece]:
        while text:
            if self._calls is not None:
                text = self._in_calls(self._calls, text)
            elif self._close is not None:
                text = self._after_calls(self._close, text)
            else:
                text = self._in_content(text)
        return self._pieces.take()

    def flush(self) -> list[Piece]:
        if self._calls is not None and not self._calls.has_calls:
            self._pieces.content(OPEN + self._raw)
        elif self._close is not None:
            self._rest += self._close.flush()
            self._give_rest()
        self._pieces.content(self._open.flush())
        return self._pieces.finish()

    def _in_content(self, text: str) -> str:
        found = self._open.push(text)
        if not isinstance(found, Found):
            self._pieces.content(found)
            return ""
        self._pieces.content(found.before)
        self._begin_calls()
        return found.after

    def _begin_calls(self) -> None:
        self._calls = CallList(self._pieces, _new_object)
        self._raw = ""

    def _in_calls(self, calls: CallList, text: str) -> str:
        for position, character in enumerate(text):
            outcome = calls.push(character)
            if not calls.has_calls:
                self._raw += character
            if outcome is Outcome.GOING:
                continue
            self._calls = None
            if not calls.has_calls:
                # It was no call: the tag is content, and what follows it is looked at anew.
                self._pieces.content(OPEN)
                return self._raw + text[position + 1 :]
            self._close, self._rest, self._is_broken = MarkerSearch(CLOSE, OPEN), "", outcome is Outcome.BROKEN
            return text[position + (0 if self._is_broken else 1) :]
        return ""

    def _after_calls(self, close: MarkerSearch, text: str) -> str:
        found = close.push(text)
        if not isinstance(found, Found):
            self._rest += found
            return ""
        self._close = None
        self._rest += found.before
        if found.marker == OPEN:
            self._give_rest()
            self._begin_calls()
        return found.after

    def _give_rest(self) -> None:
        if not self._is_broken:
            self._pieces.content(self._rest)
        self._rest = ""
