"""Calls that stand behind a marker, in a text that may be anything else.

    I'll look.<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>
              ^ here calls may begin: the text is kept                      ^ here they have ended
                                    ^ here one has begun: what was kept is gone

Until a call's name is complete, another marker begins anew, wherever it stands, in a string as well: what was kept up
to it is content. So no text is read twice, however often a model begins a call that is none.
"""

from collections.abc import Callable
from enum import Enum

from cluster.tools.call_object import Outcome
from cluster.tools.call_pieces import Piece, PieceWriter
from cluster.tools.call_scan import CallReader, CallScan
from cluster.tools.marker_search import MarkerSearch


class _State(Enum):
    CONTENT = "content"
    CALLS = "calls"
    AFTER = "after"  # whole calls: the closing marker is due; other text is content if that does not come
    LOST = "lost"  # the remains of broken calls: they go nowhere


class MarkedParser:
    """A parser of calls that `opening` announces.

    Args:
        new_reader: reads what follows the opening marker.
        closing: what stands behind calls; None: nothing.
    """

    def __init__(
        self, pieces: PieceWriter, new_reader: Callable[[], CallReader], opening: str, closing: str | None = None
    ) -> None:
        self._pieces = pieces
        self._new_reader = new_reader
        self._opening = opening
        self._closing = closing
        self._search = MarkerSearch(opening, *(() if closing is None else (closing,)))
        self._state = _State.CONTENT
        self._scan = CallScan(new_reader(), opening)
        self._rest: list[str] = []  # between calls and their closing marker

    def push(self, text: str) -> list[Piece]:
        position = 0
        while position < len(text):
            if self._state is not _State.CALLS:
                position = self._in_text(text, position)
            elif self._in_calls(text[position]):
                position += 1
        return self._pieces.take()

    def flush(self) -> list[Piece]:
        if self._state is not _State.CALLS:
            self._put(self._search.flush())
            self._give_rest()
        elif not self._scan.has_calls:
            self._pieces.content(self._scan.give_up())
        return self._pieces.finish()

    def _in_text(self, text: str, start: int) -> int:
        stretch = self._search.push(text, start)
        self._put(stretch.free)
        if stretch.marker == self._opening:
            self._give_rest()
            self._begin()
        elif stretch.marker is not None:
            if self._state is _State.CONTENT:
                self._put(stretch.marker)  # it closes nothing
            self._rest.clear()
            self._state = _State.CONTENT
        return stretch.end

    def _put(self, text: str) -> None:
        if self._state is _State.CONTENT:
            self._pieces.content(text)
        elif self._state is _State.AFTER:
            self._rest.append(text)

    def _give_rest(self) -> None:
        self._pieces.content("".join(self._rest))
        self._rest.clear()

    def _begin(self) -> None:
        self._state = _State.CALLS
        self._scan = CallScan(self._new_reader(), self._opening)

    def _in_calls(self, character: str) -> bool:
        """Whether the character was a part of it; else it has not been looked at."""
        outcome = self._scan.push(character)
        if not self._scan.has_calls:
            self._while_open(character, outcome)
            return True
        match outcome:
            case Outcome.GOING:
                return True
            case Outcome.DONE:
                self._end(_State.CONTENT if self._closing is None else _State.AFTER)
                return True
            case Outcome.OVER:
                self._end(_State.CONTENT)
            case Outcome.BROKEN:
                self._end(_State.LOST)
        return False

    def _while_open(self, character: str, outcome: Outcome) -> None:
        """No call has begun yet: another marker may come, or what shows that this is none."""
        if self._search.push(character).marker == self._opening:
            self._pieces.content(self._scan.give_up().removesuffix(self._opening))
            self._begin()
        elif outcome is not Outcome.GOING:
            # It may end with the beginning of a marker, which is looked for as ever.
            self._pieces.content(self._scan.give_up().removesuffix(self._search.kept))
            self._state = _State.CONTENT

    def _end(self, state: _State) -> None:
        self._state = state
        self._search.flush()  # what it had seen was a call's
