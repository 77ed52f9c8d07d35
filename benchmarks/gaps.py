"""Inter-token latency as it happened: the gaps between the chunks of requests, in time and as a picture."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from pathlib import Path

from benchmarks.pyplot import load_pyplot, save
from cluster.cli.open_loop import RequestRecord

_GAPS, _ARRIVALS, _WINDOW = "#2b6cb0", "#e53e3e", "#f7fafc"


@dataclass(frozen=True, slots=True)
class Gap:
    """Between two chunks of a request."""

    at_s: float  # when it began, since the load's start
    length_s: float


@dataclass(frozen=True, slots=True)
class Panel:
    """One server's, of a plot."""

    gaps: Sequence[Gap]
    arrivals_s: Sequence[float]


def gaps_within(records: Sequence[RequestRecord], begin_s: float = 0.0, end_s: float = inf) -> list[Gap]:
    """Those that begin in a window: how long one lasts is not cut off where the window ends."""
    return [
        Gap(record.due_s + earlier, later - earlier)
        for record in records
        for earlier, later in pairwise(record.chunk_s)
        if begin_s <= record.due_s + earlier < end_s
    ]


def plot_gaps(
    panels: Mapping[str, Panel], title: str, path: Path, *, window_s: tuple[float, float] | None = None
) -> Path:
    """A PNG with a panel for each server, gaps over time, arrivals as marks below.

    Args:
        window_s: in which gaps are counted, shaded; None: all are.

    Raises:
        NoMatplotlib: it is not installed.
        OSError: the file cannot be written.
    """
    size = (9, 2.2 * len(panels) + 0.8)
    figure, grid = load_pyplot().subplots(len(panels), 1, figsize=size, sharex=True, sharey=True, squeeze=False)
    for axes, (name, panel) in zip(grid[:, 0], panels.items(), strict=True):
        axes.scatter([gap.at_s for gap in panel.gaps], [1000 * gap.length_s for gap in panel.gaps], s=3, color=_GAPS)
        low = [0.03] * len(panel.arrivals_s)  # of the panel's height
        axes.plot(panel.arrivals_s, low, "|", color=_ARRIVALS, transform=axes.get_xaxis_transform())
        if window_s is not None:
            axes.axvspan(*window_s, color=_WINDOW, zorder=0)
        axes.set_yscale("log")
        axes.set_ylabel("ITL, ms")
        axes.set_title(name, loc="left", fontsize="medium")
        axes.grid(axis="y", alpha=0.3)
    grid[-1, 0].set_xlabel("seconds since the start")
    figure.suptitle(title)
    figure.tight_layout()
    return save(figure, path)
