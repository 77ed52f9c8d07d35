"""Attainment against rate, and inter-token latency over time."""

from collections.abc import Sequence
from pathlib import Path

from benchmarks.gaps import Panel, gaps_within, plot_gaps
from benchmarks.pyplot import load_pyplot, save
from benchmarks.serve.report import Summary
from benchmarks.serve.sweep import Measured
from cluster.cli.goodput import ATTAINMENT, Objectives


def plot(measured: Sequence[Measured], summary: Summary, objectives: Objectives | None, folder: Path) -> list[Path]:
    """PNGs; attainment only where there are objectives.

    Raises:
        NoMatplotlib: it is not installed.
        OSError: a file cannot be written.
    """
    written = [] if objectives is None else [_plot_attainment(summary, objectives, folder / "serve-attainment.png")]
    highest = summary.rates[-1]
    # The last round of the highest rate: there is the most to see.
    last = {one.endpoint: one for one in measured if one.rate == highest}
    panels = {
        name: Panel(gaps_within(last[name].records), [record.due_s for record in last[name].records])
        for name in summary.endpoints
    }
    return [*written, plot_gaps(panels, f"{highest:.3g} requests a second", folder / "serve-itl.png")]


def _plot_attainment(summary: Summary, objectives: Objectives, path: Path) -> Path:
    figure, axes = load_pyplot().subplots(figsize=(7, 4))
    for endpoint in summary.endpoints:
        rates, shares = zip(*summary.attained(endpoint), strict=True)
        [line] = axes.plot(rates, [100 * share for share in shares], "o-", label=endpoint)
        if (goodput := summary.goodput(endpoint)) is not None:
            axes.axvline(goodput, color=line.get_color(), linestyle=":")
    axes.axhline(100 * ATTAINMENT, color="#718096", linestyle="--", linewidth=1)
    axes.set_ylim(0, 103)
    axes.set_xlim(left=0)
    axes.set_xlabel("requests a second")
    axes.set_ylabel("requests that kept their objectives, %")
    axes.set_title(str(objectives))
    axes.legend()
    return save(figure, path)
