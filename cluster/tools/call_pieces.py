"""What a model's text is taken apart into."""

import uuid
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


def new_call_id() -> str:
    """What a client knows a call by."""
    return f"call_{uuid.uuid4().hex[:24]}"


class PieceWriter:
    """Gathers pieces until they are taken. White space that touches a call's markup belongs to it, and is left out.

    Args:
        max_calls: further calls are left out; None: all are wanted.
    """

    def __init__(self, max_calls: int | None = None) -> None:
        self._max_calls = max_calls
        self._num_calls = 0
        self._pieces: list[Piece] = []
        self._texts: list[str] = []  # of the piece that is being written: it may be made of single characters
        self._index: int | None = None  # whose arguments that is; None: content
        self._space: list[str] = []  # the end of the content so far: it leaves when more content follows
        self._follows_call = False

    def content(self, text: str) -> None:
        """Adds to what is said."""
        if self._follows_call:
            text = text.lstrip()
        if not text:
            return
        self._follows_call = False
        said = text.rstrip()
        if said:
            self._write(None, "".join(self._space) + said)
            self._space = []
        self._space.append(text[len(said) :])

    def start(self, name: str) -> None:
        """Begins a call."""
        self._space = []
        self._follows_call = True
        self._num_calls += 1
        if self._is_wanted:
            self._complete()
            self._pieces.append(CallStart(self._num_calls - 1, name))

    def arguments(self, text: str) -> None:
        """Adds to the arguments of the last call."""
        if self._is_wanted:
            self._write(self._num_calls - 1, text)

    def take(self) -> list[Piece]:
        """The pieces since the last time; no two that follow each other could be one."""
        self._complete()
        pieces, self._pieces = self._pieces, []
        return pieces

    def finish(self) -> list[Piece]:
        """The last pieces, at the text's end."""
        self._write(None, "".join(self._space))
        self._space = []
        return self.take()

    @property
    def num_calls(self) -> int:
        """Calls that have begun."""
        return self._num_calls

    @property
    def _is_wanted(self) -> bool:
        return self._max_calls is None or self._num_calls <= self._max_calls

    def _write(self, index: int | None, text: str) -> None:
        if not text:
            return
        if index != self._index:
            self._complete()
            self._index = index
        self._texts.append(text)

    def _complete(self) -> None:
        text = "".join(self._texts)
        self._texts = []
        if text:
            self._pieces.append(Content(text) if self._index is None else CallArguments(self._index, text))
