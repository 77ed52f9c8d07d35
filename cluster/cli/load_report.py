"""What a load has shown: latencies as percentiles, tokens as rates."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cluster.cli.goodput import Objectives
from cluster.cli.open_loop import RequestRecord


@dataclass(frozen=True, slots=True)
class Latency:
    """Of many times, in seconds: the mean and some percentiles (linear between the two nearest)."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, times_s: Sequence[float]) -> "Latency | None":
        """None if there are no times."""
        if not times_s:
            return None
        times = sorted(times_s)
        return cls(
            mean=math.fsum(times) / len(times),
            p50=percentile(times, 50),
            p90=percentile(times, 90),
            p99=percentile(times, 99),
            max=times[-1],
        )


def percentile(times: Sequence[float], percent: float) -> float:
    """Of sorted times."""
    rank = (len(times) - 1) * percent / 100
    low = math.floor(rank)
    high = min(low + 1, len(times) - 1)
    return times[low] + (times[high] - times[low]) * (rank - low)


@dataclass(frozen=True, slots=True)
class LoadReport:
    """All requests of a load together. Rates count what completed requests got."""

    duration_s: float
    completed: int
    failed: int
    prompt_tokens: int
    cached_tokens: int  # of the prompt tokens, those that nobody computed
    output_tokens: int
    ttft: Latency | None  # time to the first token
    itl: Latency | None  # between two chunks of a request
    tpot: Latency | None  # per output token after the first, one value a request
    e2e: Latency | None
    good: int | None = None  # requests that kept all objectives; None: there were none to keep

    @classmethod
    def of(
        cls, records: Sequence[RequestRecord], duration_s: float, objectives: Objectives | None = None
    ) -> "LoadReport":
        done = [record for record in records if record.error is None]
        return cls(
            duration_s=duration_s,
            completed=len(done),
            failed=len(records) - len(done),
            prompt_tokens=sum(record.num_prompt_tokens for record in done),
            cached_tokens=sum(record.num_cached_tokens for record in done),
            output_tokens=sum(record.num_output_tokens for record in done),
            ttft=Latency.of([record.ttft_s for record in done]),
            itl=Latency.of([gap for record in done for gap in record.itl_s]),
            tpot=Latency.of([tpot for record in done if (tpot := record.tpot_s) is not None]),
            e2e=Latency.of([record.end_s for record in done]),
            good=None if objectives is None else sum(map(objectives.are_kept_by, records)),
        )

    @property
    def requests_per_s(self) -> float:
        return self.completed / self.duration_s

    @property
    def goodput(self) -> float | None:
        """Requests a second that kept all objectives."""
        return None if self.good is None else self.good / self.duration_s

    @property
    def attainment(self) -> float | None:
        """The share of all requests, failed ones too, that kept all objectives."""
        return None if self.good is None else self.good / (self.completed + self.failed)

    @property
    def output_tokens_per_s(self) -> float:
        return self.output_tokens / self.duration_s

    def as_json(self) -> dict[str, Any]:
        """Plain values; all times in seconds."""
        latencies = {name: getattr(self, name) for name in ("ttft", "itl", "tpot", "e2e")}
        return {
            "duration_s": self.duration_s,
            "completed": self.completed,
            "failed": self.failed,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "output_tokens": self.output_tokens,
            "requests_per_s": self.requests_per_s,
            "output_tokens_per_s": self.output_tokens_per_s,
            "goodput_requests_per_s": self.goodput,
            "slo_attainment": self.attainment,
        } | {
            f"{name}_s": None if latency is None else {k: getattr(latency, k) for k in latency.__slots__}
            for name, latency in latencies.items()
        }
