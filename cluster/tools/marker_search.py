"""Markers in a text that arrives in pieces."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Found:
    """A marker, and what stands around it."""

    before: str
    marker: str
    after: str


class MarkerSearch:
    """Looks for the first of `markers`; keeps back the end of the text that could still become one."""

    def __init__(self, *markers: str) -> None:
        self._markers: Sequence[str] = markers
        self._kept = ""

    def push(self, text: str) -> str | Found:
        """The text that is free of markers, or the first marker in it."""
        seen = self._kept + text
        self._kept = ""
        places = [(seen.find(marker), marker) for marker in self._markers if marker in seen]
        if places:
            at, marker = min(places)
            return Found(seen[:at], marker, seen[at + len(marker) :])
        longest = max(map(len, self._markers)) - 1
        for start in range(max(len(seen) - longest, 0), len(seen)):
            if any(marker.startswith(seen[start:]) for marker in self._markers):
                self._kept = seen[start:]
                return seen[:start]
        return seen

    def flush(self) -> str:
        """The end of the text: what was kept back became no marker."""
        kept, self._kept = self._kept, ""
        return kept
