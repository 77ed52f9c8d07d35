"""Stop strings in a text that arrives in pieces.

    seen so far:   "... and the"          stop: "the end"
    let out:       "... and "             kept back: "the", which could still become the stop

What is kept back is the longest end of the text that begins some stop string. The text ends at the stop string that is
complete first; of several that end with the same character, at the longest. So the result does not depend on how the
text was cut into pieces, and no part of a stop string ever leaves.

Each stop string is followed by the automaton of Knuth, Morris and Pratt: constant work for a character and a string.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopMatch:
    """A stop string was completed."""

    text: str  # what may still leave: up to the stop string, or with it
    stop: str


class StopMatcher:
    """Looks for any of `stops` in one sequence's text. Empty strings are no stop strings."""

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        self._automata = [_Automaton(stop) for stop in dict.fromkeys(stops) if stop]
        self._include_stop = include_stop
        self._kept = ""

    def push(self, text: str) -> str | StopMatch:
        """Takes the next piece: the text that may leave now, or the match that ends it."""
        if not self._automata:
            return text
        for position, character in enumerate(text):
            complete = [a.stop for a in self._automata if a.advance(character)]
            if complete:
                stop = max(complete, key=len)
                seen = self._kept + text[: position + 1]
                self._kept = ""
                return StopMatch(seen if self._include_stop else seen[: -len(stop)], stop)
        seen = self._kept + text
        free = len(seen) - max(automaton.matched for automaton in self._automata)
        self._kept = seen[free:]
        return seen[:free]

    def flush(self) -> str:
        """The end of the text: what was kept back became no stop string."""
        kept, self._kept = self._kept, ""
        return kept


class _Automaton:
    """How much of one stop string the text ends with."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matched = 0
        # _borders[n]: of the first n characters, the longest proper beginning that is their end as well.
        self._borders = [0, 0]
        length = 0
        for position in range(1, len(stop)):
            while length and stop[position] != stop[length]:
                length = self._borders[length]
            length += stop[position] == stop[length]
            self._borders.append(length)

    def advance(self, character: str) -> bool:
        """Whether the stop string is complete with this character."""
        while self.matched and self.stop[self.matched] != character:
            self.matched = self._borders[self.matched]
        self.matched += self.stop[self.matched] == character
        return self.matched == len(self.stop)
