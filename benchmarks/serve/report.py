"""What was measured: medians of the rounds, ratios of servers, and goodput."""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from benchmarks.serve.sweep import Measured
from cluster.cli.goodput import ATTAINMENT, highest_rate
from cluster.cli.load_report import LoadReport

Figures = dict[str, float | None]  # by what they are and their unit; None: there is no such thing in this load


def figures(report: LoadReport) -> Figures:
    """Of one load, in the order in which they are shown; latencies in milliseconds."""
    found: Figures = {
        "requests kept their objectives, %": None if report.attainment is None else 100 * report.attainment,
        "good requests/s": report.goodput,
    }
    latencies = {"TTFT": report.ttft, "ITL": report.itl, "TPOT": report.tpot, "E2E": report.e2e}
    for name, latency in latencies.items():
        for percentile in ("p50", "p90", "p99"):
            value = None if latency is None else 1000 * getattr(latency, percentile)
            found[f"{name} {percentile}, ms"] = value
    found["output tokens/s"] = report.output_tokens_per_s
    found["requests/s"] = report.requests_per_s
    found["prompt tokens cached, %"] = 100 * report.cached_tokens / max(1, report.prompt_tokens)
    found["failed requests"] = float(report.failed)
    return found


@dataclass(frozen=True, slots=True)
class Summary:
    """Of all rounds."""

    endpoints: tuple[str, ...]
    rates: tuple[float, ...]  # ascending
    medians: dict[tuple[str, float], Figures]  # by endpoint and rate

    @classmethod
    def of(cls, measured: Sequence[Measured]) -> "Summary":
        by_point: dict[tuple[str, float], list[Figures]] = {}
        for one in measured:
            by_point.setdefault((one.endpoint, one.rate), []).append(figures(one.report))
        names = dict.fromkeys(one.endpoint for one in sorted(measured, key=lambda one: one.round))
        rates = sorted({one.rate for one in measured})
        return cls(tuple(names), tuple(rates), {point: _median(rounds) for point, rounds in by_point.items()})

    def attained(self, endpoint: str) -> list[tuple[float, float]]:
        """Rate, and the share of requests that kept their objectives, where there were any."""
        values = ((rate, self.medians[endpoint, rate]["requests kept their objectives, %"]) for rate in self.rates)
        return [(rate, value / 100) for rate, value in values if value is not None]

    def goodput(self, endpoint: str) -> float | None:
        """The highest of the rates with enough attainment."""
        return highest_rate(self.attained(endpoint))

    def tables(self) -> Iterator[Table]:
        """One for each endpoint, then one for each but the first beside the first."""
        for endpoint in self.endpoints:
            of_one = [self.medians[endpoint, rate] for rate in self.rates]
            yield self._table(endpoint, [{name: _number(value) for name, value in each.items()} for each in of_one])
        first, *others = self.endpoints
        for other in others:
            pairs = [(self.medians[other, rate], self.medians[first, rate]) for rate in self.rates]
            yield self._table(f"{other} / {first}", [{name: _ratio(a[name], b[name]) for name in a} for a, b in pairs])

    def sentences(self) -> Iterator[str]:
        """Goodput in words, where there were objectives."""
        for endpoint in self.endpoints:
            if self.attained(endpoint):
                rate = self.goodput(endpoint)
                found = "at none of these rates" if rate is None else f"up to {rate:g} requests/s"
                yield f"{endpoint}: {ATTAINMENT:.0%} of the requests keep their objectives {found}"

    def as_json(self) -> dict[str, Any]:
        return {
            endpoint: {
                "goodput_at_attainment": {"share": ATTAINMENT, "requests_per_s": self.goodput(endpoint)},
                "rates": [{"rate": rate, **self.medians[endpoint, rate]} for rate in self.rates],
            }
            for endpoint in self.endpoints
        }

    def _table(self, title: str, columns: Sequence[dict[str, str]]) -> Table:
        table = Table(title=title, title_justify="left")
        table.add_column("requests a second")
        for rate in self.rates:
            table.add_column(f"{rate:.3g}", justify="right")
        for name in columns[0]:
            cells = [column[name] for column in columns]
            if any(cells):
                table.add_row(name, *cells)
        return table


def _median(rounds: Sequence[Figures]) -> Figures:
    values = {name: [each for found in rounds if (each := found[name]) is not None] for name in rounds[0]}
    return {name: statistics.median(each) if each else None for name, each in values.items()}


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,.2f}" if value < 10 else f"{value:,.1f}"


def _ratio(value: float | None, of: float | None) -> str:
    return "" if value is None or not of else f"{value / of:.2f}"
