"""Markers in a text that arrives in pieces."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Stretch:
    """A stretch of a text, up to a marker, or up to the text's end.

    Attributes:
        free: the text before the marker; without one, what cannot be a part of any.
        marker: None: there is none yet.
        end: where in the text the stretch ends.
    """

    free: str
    marker: str | None
    end: int


class MarkerSearch:
    """Looks for `markers`; keeps back the end of the text that could still become one.

    All markers begin with the same character, and none has it twice: so what turns out to be no marker holds the
    beginning of none either, and no character is looked at twice.
    """

    def __init__(self, *markers: str) -> None:
        self._first = markers[0][0]
        assert all(marker.rfind(self._first) == 0 for marker in markers), markers
        self._markers = markers
        self._kept = ""

    @property
    def kept(self) -> str:
        """The beginning of a marker, that the text so far ends with."""
        return self._kept

    def push(self, text: str, start: int = 0) -> Stretch:
        """Looks at the text from `start` on, as far as the end of the first marker."""
        free: list[str] = []
        position = start
        while position < len(text):
            if not self._kept:
                found = text.find(self._first, position)
                at = len(text) if found < 0 else found
                free.append(text[position:at])
                position = at
                if at == len(text):
                    break
            character = text[position]
            position += 1
            seen = self._kept + character
            if seen in self._markers:
                self._kept = ""
                return Stretch("".join(free), seen, position)
            if any(marker.startswith(seen) for marker in self._markers):
                self._kept = seen
                continue
            free.append(self._kept)
            self._kept = ""
            position -= 1  # it may be the first of a marker
        return Stretch("".join(free), None, position)

    def flush(self) -> str:
        """The end of the text: what was kept back became no marker."""
        kept, self._kept = self._kept, ""
        return kept
