"""matplotlib, for the benchmarks that draw; nothing else needs it."""

import importlib
from pathlib import Path
from typing import Any


class NoMatplotlib(Exception):
    """Plots were asked for, and matplotlib is not installed; the message says how to."""


def load_pyplot() -> Any:
    """matplotlib.pyplot, drawing into files. To be called before the work, so that a plot does not fail after it.

    Raises:
        NoMatplotlib: it is not installed.
    """
    try:
        importlib.import_module("matplotlib").use("Agg")
        return importlib.import_module("matplotlib.pyplot")
    except ModuleNotFoundError as error:
        raise NoMatplotlib("plots need matplotlib: pip install matplotlib, or leave --plots out") from error


def save(figure: Any, path: Path) -> Path:
    """Writes a PNG, makes its folder if there is none, and closes the figure.

    Raises:
        OSError: it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120, bbox_inches="tight")
    load_pyplot().close(figure)
    return path
