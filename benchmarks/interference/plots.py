"""Inter-token latency over time: one panel for each arrangement, prompts as marks below."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.interference.figures import gaps_within
from benchmarks.interference.load import RoundLoad, RoundRecords
from benchmarks.pyplot import load_pyplot, save

_STREAMS, _PROMPTS = "#2b6cb0", "#e53e3e"


def plot_gaps(rounds: Mapping[str, RoundRecords], load: RoundLoad, path: Path) -> Path:
    """A PNG of one round of each arrangement.

    Raises:
        NoMatplotlib: it is not installed.
        OSError: the file cannot be written.
    """
    figure, panels = load_pyplot().subplots(
        len(rounds), 1, figsize=(9, 2.2 * len(rounds) + 0.8), sharex=True, sharey=True, squeeze=False
    )
    for axes, (name, records) in zip(panels[:, 0], rounds.items(), strict=True):
        _draw(axes, name, records, load)
    panels[-1, 0].set_xlabel("seconds since the streams were sent")
    figure.suptitle(
        f"{load.num_streams} streams while prompts of {load.prompt_len:,} tokens arrive, {load.rate:.2f} a second"
    )
    figure.tight_layout()
    return save(figure, path)


def _draw(axes: Any, name: str, records: RoundRecords, load: RoundLoad) -> None:
    gaps = gaps_within(records.streams, 0.0, load.window[1])
    axes.scatter([gap.at_s for gap in gaps], [1000 * gap.length_s for gap in gaps], s=3, color=_STREAMS)
    arrivals = [record.due_s for record in records.prompts]
    axes.plot(arrivals, [0.03] * len(arrivals), "|", color=_PROMPTS, transform=axes.get_xaxis_transform())
    axes.axvspan(*load.window, color="#f7fafc", zorder=0)
    axes.set_yscale("log")
    axes.set_ylabel("ITL, ms")
    axes.set_title(name, loc="left", fontsize="medium")
    axes.grid(axis="y", alpha=0.3)
