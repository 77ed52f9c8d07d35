"""Tables as pictures, if matplotlib is there; nothing else needs it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.paging.report import Table
from benchmarks.pyplot import load_pyplot, save

_SHARES = ("holds tokens, %", "for later tokens, %", "never used, %", "free, %")
_COLORS = ("#2b6cb0", "#90cdf4", "#e53e3e", "#e2e8f0")


def plot(tables: Sequence[Table], folder: Path) -> list[Path]:
    """A PNG for each table that has a picture; their paths.

    Raises:
        NoMatplotlib: it is not installed.
        OSError: the folder cannot be written.
    """
    pyplot = load_pyplot()
    paths = []
    for table in tables:
        draw = next((draw for prefix, draw in _DRAWN.items() if table.name.startswith(prefix)), None)
        if draw is None:
            continue
        figure = draw(pyplot, table)
        paths.append(save(figure, folder / f"{table.name.replace(',', '').replace(' ', '-').lower()}.png"))
    return paths


def _draw_memory(pyplot: Any, table: Table) -> Any:
    """What each memory holds, as stacked bars."""
    figure, axes = pyplot.subplots(figsize=(9, 0.4 * len(table.rows) + 1.5))
    names = table.column("memory")
    left = [0.0] * len(names)
    for share, color in zip(_SHARES, _COLORS, strict=True):
        values = [float(value or 0) for value in table.column(share)]
        axes.barh(names, values, left=left, color=color, label=share.removesuffix(", %"))
        left = [a + b for a, b in zip(left, values, strict=True)]
    published = [(row, value) for row, value in enumerate(table.column("published, %")) if value is not None]
    if published:
        axes.plot(
            [value for _, value in published], [row for row, _ in published], "k|", markersize=14, label="published"
        )
    axes.invert_yaxis()
    axes.set_xlim(0, 100)
    axes.set_xlabel("share of the KV memory, %")
    axes.set_title(table.name)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=5, fontsize="small")
    return figure


def _draw_blocks(pyplot: Any, table: Table) -> Any:
    """Waste rises and the kernel's time falls with the block size."""
    figure, waste = pyplot.subplots(figsize=(7, 4))
    time = waste.twinx()
    sizes = table.column("block size")
    waste.plot(sizes, table.column("wasted of granted, %"), "o-", color=_COLORS[2], label="wasted of granted, %")
    time.plot(sizes, table.column("scattered, µs"), "s-", color=_COLORS[0], label="scattered, µs")
    time.plot(sizes, table.column("in a row, µs"), "s--", color=_COLORS[1], label="in a row, µs")
    waste.set_xscale("log", base=2)
    waste.set_xticks(sizes, [str(size) for size in sizes])
    waste.set_xlabel("block size, tokens")
    waste.set_ylabel("wasted of granted, %")
    waste.set_ylim(bottom=0)
    time.set_ylabel("decode attention of a layer, µs")
    time.set_ylim(bottom=0)
    waste.set_title(table.name)
    figure.legend(loc="upper center", bbox_to_anchor=(0.5, 0), ncols=3, fontsize="small")
    return figure


_DRAWN = {"memory of": _draw_memory, "block sizes": _draw_blocks}
