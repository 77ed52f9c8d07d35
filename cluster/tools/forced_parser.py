"""Text that is held to calls (`call_structure`): there is no markup in it.

A text that was cut off before it became a call is content.
"""

from cluster.tools.call_list import CallList
from cluster.tools.call_object import Outcome
from cluster.tools.call_pieces import Piece, PieceWriter
from cluster.tools.call_scan import CallScan


class NamedCallParser:
    """All of the text is the arguments of one function."""

    def __init__(self, pieces: PieceWriter, name: str) -> None:
        self._pieces = pieces
        self._name = name

    def push(self, text: str) -> list[Piece]:
        if text and not self._pieces.num_calls:
            self._pieces.start(self._name)
        self._pieces.arguments(text)
        return self._pieces.take()

    def flush(self) -> list[Piece]:
        return self._pieces.finish()


class RequiredCallParser:
    """An array of `{"name", "parameters"}`."""

    def __init__(self, pieces: PieceWriter) -> None:
        self._pieces = pieces
        self._scan = CallScan(CallList(pieces))
        self._is_over = False

    def push(self, text: str) -> list[Piece]:
        for position, character in enumerate(text):
            if self._is_over:
                self._say(text[position:])
                break
            self._is_over = self._scan.push(character) is not Outcome.GOING
        return self._pieces.take()

    def flush(self) -> list[Piece]:
        self._say("")
        return self._pieces.finish()

    def _say(self, text: str) -> None:
        """It is no call, or what stands behind calls, which goes nowhere."""
        if not self._scan.has_calls:
            self._pieces.content(self._scan.give_up() + text)
