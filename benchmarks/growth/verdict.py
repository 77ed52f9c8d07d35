"""Whether something has grown: a ratio of figures that should be equal, and what is allowed."""

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.paging.report import Table


@dataclass(frozen=True, slots=True)
class Verdict:
    """`ratio` of a figure at the far end of a curve to that at its near end; None: these points do not tell."""

    what: str
    ratio: float | None
    at_most: float

    @property
    def holds(self) -> bool:
        return self.ratio is not None and self.ratio <= self.at_most

    def __str__(self) -> str:
        if self.ratio is None:
            return f"{self.what}: not measurable (too few or too noisy points)"
        return f"{self.what}: {self.ratio:.2f} × (at most {self.at_most:g}: {'holds' if self.holds else 'GROWS'})"


def constant(what: str, values: Sequence[float], at_most: float) -> Verdict:
    """The last of `values` over the first."""
    return Verdict(what, _ratio(values[-1], values[0]), at_most)


def proportional(what: str, sizes: Sequence[float], values: Sequence[float], at_most: float) -> Verdict:
    """Growth by size over the upper part of a curve, over that of the whole: 1 is a straight line.

    Where either does not grow, noise is larger than growth, and nothing is said of it.

    Args:
        sizes: rising; the upper part begins at the first above a quarter of the last.
    """
    if len(sizes) < 3:
        raise ValueError(f"a curve has at least three points, not {list(sizes)}")
    middle = next(i for i, size in enumerate(sizes) if size > sizes[-1] / 4)
    middle = min(max(middle, 1), len(sizes) - 2)

    def slope(first: int) -> float:
        return (values[-1] - values[first]) / (sizes[-1] - sizes[first])

    return Verdict(what, _ratio(slope(middle), slope(0)), at_most)


def _ratio(figure: float, reference: float) -> float | None:
    return figure / reference if figure > 0 and reference > 0 else None


@dataclass(frozen=True, slots=True)
class Finding:
    """A table, and what follows from it."""

    table: Table
    verdicts: Sequence[Verdict]

    def noted(self) -> Table:
        """The table with its verdicts below."""
        self.table.notes.extend(map(str, self.verdicts))
        return self.table


def numbers(table: Table, column: str) -> list[float]:
    """A column, none of whose cells is text or empty."""
    values = []
    for cell in table.column(column):
        assert isinstance(cell, int | float), f"{cell!r} in column {column}"
        values.append(cell)
    return values
