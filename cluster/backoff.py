"""How long to wait before trying again: doubling, bounded, and forgotten after a success."""

from dataclasses import dataclass


@dataclass(slots=True)
class Backoff:
    """Delays of one thing that is tried again and again, in seconds."""

    first_s: float = 0.1
    max_s: float = 5.0
    _failures: int = 0

    def next_delay(self) -> float:
        """The wait after one more failure."""
        delay = min(self.first_s * 2.0**self._failures, self.max_s)
        # Past this the delay no longer grows, and the power must not overflow.
        self._failures = min(self._failures + 1, 64)
        return delay

    def succeeded(self) -> None:
        """The next failure counts as the first."""
        self._failures = 0
