"""Text that may turn out to be calls: it is kept for as long as that is open, since until then it may be content."""

from typing import Protocol

from cluster.tools.call_object import Outcome


class CallReader(Protocol):
    """Reads calls, character by character. `has_calls`: one has begun."""

    @property
    def has_calls(self) -> bool: ...

    def push(self, character: str) -> Outcome: ...


class CallScan:
    """One stretch of text that may be calls.

    Args:
        opening: what stood before it and is content if it is none.
    """

    def __init__(self, reader: CallReader, opening: str = "") -> None:
        self._reader = reader
        self._kept = [opening]

    @property
    def has_calls(self) -> bool:
        """Whether a call has begun: from then on nothing of the text is content."""
        return self._reader.has_calls

    def push(self, character: str) -> Outcome:
        """Takes the next character."""
        outcome = self._reader.push(character)
        if self._reader.has_calls:
            self._kept.clear()
        else:
            self._kept.append(character)
        return outcome

    def give_up(self) -> str:
        """All of the text, and what stood before it, because no call has begun."""
        text = "".join(self._kept)
        self._kept.clear()
        return text
