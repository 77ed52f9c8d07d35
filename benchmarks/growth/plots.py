"""Each section's table as curves."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.growth.pool import EMPTY, FULL
from benchmarks.paging.report import Table
from benchmarks.pyplot import load_pyplot, save

Curves = dict[str, tuple[Sequence[Any], Sequence[Any]]]  # sizes and values by name

_COLORS = ("#2b6cb0", "#e53e3e", "#2f855a", "#90cdf4", "#feb2b2", "#9ae6b4")


def plot(table: Table, folder: Path) -> Path:
    """The table's PNG; its path.

    Raises:
        NoMatplotlib: it is not installed.
        OSError: the folder cannot be written.
    """
    panels = _PANELS[table.name](table)
    figure, axes = load_pyplot().subplots(1, len(panels), figsize=(5.5 * len(panels), 4), squeeze=False)
    for panel, (ylabel, curves) in zip(axes[0], panels.items(), strict=True):
        for color, (name, (sizes, values)) in zip(_COLORS, curves.items(), strict=False):
            panel.plot(sizes, values, "o-", color=color, label=name)
        if table.name in ("pool", "directory"):  # what is constant; elsewhere a line is to be seen as one
            panel.set_xscale("log")
        panel.set_xlabel(table.columns[0].name)
        panel.set_ylabel(ylabel)
        panel.set_ylim(bottom=0)
        panel.grid(alpha=0.3)
        panel.legend(fontsize="small")
    figure.suptitle(table.title)
    figure.tight_layout()
    return save(figure, folder / f"growth-{table.name}.png")


def _batch(table: Table) -> dict[str, Curves]:
    sizes = table.column("requests")
    return {
        "a step, ms": {
            "executor": (sizes, table.column("executor, ms")),
            "rest": (sizes, [float(str(us)) / 1000 for us in table.column("rest, µs")]),
        },
        "rest, µs": {
            "a step": (sizes, table.column("rest, µs")),
            "a request": (sizes, table.column("rest a request, µs")),
        },
    }


def _context(table: Table) -> dict[str, Curves]:
    sizes = table.column("tokens")
    return {
        "a step, ms": {"executor": (sizes, table.column("executor, ms"))},
        "a step, µs": {"rest": (sizes, table.column("rest, µs"))},
    }


def _pool(table: Table) -> dict[str, Curves]:
    curves: Curves = {}
    for state in (EMPTY, FULL):
        rows = [number for number, row in enumerate(table.rows) if state in row]
        for name in ("request, µs", "hit, µs", "step, µs"):
            sizes, values = ([table.column(column)[row] for row in rows] for column in ("blocks", name))
            curves[f"{name.removesuffix(', µs')}, {state} cached"] = (sizes, values)
    return {"without the executor, µs": curves}


def _directory(table: Table) -> dict[str, Curves]:
    sizes, *columns = (column.name for column in table.columns)
    return {"µs": {name.removesuffix(", µs"): (table.column(sizes), table.column(name)) for name in columns}}


_PANELS = {"batch": _batch, "context": _context, "pool": _pool, "directory": _directory}
