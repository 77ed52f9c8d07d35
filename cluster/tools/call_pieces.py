"""What a model's text is taken apart into."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Content:
    """Said to the user."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call begins; its arguments follow."""

    index: int  # of the call, in its message
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of a call's arguments: joined they are what the model wrote, JSON if it wrote JSON."""

    index: int
    text: str


Piece = Content | CallStart | CallArguments


class PieceWriter:
    """Gathers pieces until they are taken. White space that touches a call's markup belongs to it, and is left out.

    Args:
        max_calls: further calls are left out; None: all are wanted.
    """

    def __init__(self, max_calls: int | None = None) -> None:
        self._max_calls = max_calls
        self._num_calls = 0
        self._pieces: list[Piece] = []
        self._space = ""  # the end of the content so far: it leaves when more content follows
        self._follows_call = False

    def content(self, text: str) -> None:
        """Adds to what is said."""
        if self._follows_call:
            text = text.lstrip()
        if not text:
            return
        self._follows_call = False
        text = self._space + text
        said = text.rstrip()
        self._space = text[len(said) :]
        self._say(said)

    def start(self, name: str) -> None:
        """Begins a call."""
        self._space = ""
        self._follows_call = True
        self._num_calls += 1
        if self._is_wanted:
            self._pieces.append(CallStart(self._num_calls - 1, name))

    def arguments(self, text: str) -> None:
        """Adds to the arguments of the last call."""
        if not text or not self._is_wanted:
            return
        index = self._num_calls - 1
        last = self._pieces[-1] if self._pieces else None
        if isinstance(last, CallArguments) and last.index == index:
            self._pieces[-1] = CallArguments(index, last.text + text)
        else:
            self._pieces.append(CallArguments(index, text))

    def take(self) -> list[Piece]:
        """The pieces since the last time."""
        pieces, self._pieces = self._pieces, []
        return pieces

    def finish(self) -> list[Piece]:
        """The last pieces, at the text's end."""
        space, self._space = self._space, ""
        self._say(space)
        return self.take()

    @property
    def num_calls(self) -> int:
        """Calls that have begun."""
        return self._num_calls

    @property
    def _is_wanted(self) -> bool:
        return self._max_calls is None or self._num_calls <= self._max_calls

    def _say(self, text: str) -> None:
        if not text:
            return
        last = self._pieces[-1] if self._pieces else None
        if isinstance(last, Content):
            self._pieces[-1] = Content(last.text + text)
        else:
            self._pieces.append(Content(text))


def joined_pieces(pieces: Sequence[Piece]) -> list[Piece]:
    """The same pieces, with those that follow each other joined: how they were cut is gone."""
    joined: list[Piece] = []
    for piece in pieces:
        match (joined[-1] if joined else None, piece):
            case (Content(before), Content(text)):
                joined[-1] = Content(before + text)
            case (CallArguments(index, before), CallArguments(other, text)) if index == other:
                joined[-1] = CallArguments(index, before + text)
            case _:
                joined.append(piece)
    return joined
