"""Service level objectives: what a request must keep to be of use, and how many did.

The syntax and the sense are those of `vllm bench serve --goodput`; goodput at an attainment is DistServe's (OSDI 2024):
the highest rate at which enough requests keep all objectives.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

from cluster.cli.open_loop import RequestRecord

ATTAINMENT = 0.9  # the share of requests that DistServe asks for

_FIELDS = {"ttft": "ttft_s", "tpot": "tpot_s", "e2el": "e2e_s"}  # by the name that vLLM gives them


@dataclass(frozen=True, slots=True)
class Objectives:
    """The most that each time of a request may be, in seconds; None: it is not looked at."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None

    @classmethod
    def parse(cls, texts: Sequence[str]) -> Self:
        """From `ttft:2000 tpot:100`, in milliseconds, as one text or several.

        Raises:
            ValueError: a name or a value that is not allowed; the message has it.
        """
        found: dict[str, float] = {}
        for pair in " ".join(texts).split():
            name, _, value = pair.partition(":")
            if name not in _FIELDS:
                raise ValueError(f"goodput: there are {', '.join(_FIELDS)}, each as name:milliseconds, not {pair!r}")
            if _FIELDS[name] in found:
                raise ValueError(f"goodput: {name} is given twice")
            found[_FIELDS[name]] = _milliseconds(pair, value) / 1000
        return cls(**found)

    def __str__(self) -> str:
        values = ((name, getattr(self, field)) for name, field in _FIELDS.items())
        return " ".join(f"{name}:{1000 * value:g}" for name, value in values if value is not None)

    def are_kept_by(self, record: RequestRecord) -> bool:
        """Whether a request kept all of them. One that failed kept none; one token has no time per token."""
        if record.error is not None:
            return False
        times = ((self.ttft_s, record.ttft_s), (self.tpot_s, record.tpot_s or 0.0), (self.e2e_s, record.end_s))
        return all(most is None or time <= most for most, time in times)


def highest_rate(attained: Iterable[tuple[float, float]], share: float = ATTAINMENT) -> float | None:
    """The highest of the rates at which at least `share` of the requests kept their objectives; None: there is none.

    Args:
        attained: rate in requests a second, and the share of requests there.
    """
    return max((rate for rate, kept in attained if kept >= share), default=None)


def _milliseconds(pair: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise ValueError(f"goodput: a number of milliseconds, at least 0, must follow the colon of {pair!r}")
    return value
