"""Tables: what a section found, for a terminal and for JSON."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import rich.table

Cell = str | float | None  # None: nothing to say


@dataclass(frozen=True, slots=True)
class Column:
    name: str
    form: str = ""  # of its numbers, as `format` takes it


@dataclass(slots=True)
class Table:
    """One table. What a row means is said by its first cells, what its figures mean by columns and notes."""

    name: str  # short: its key in JSON
    title: str
    columns: Sequence[Column]
    rows: list[tuple[Cell, ...]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, *cells: Cell) -> None:
        assert len(cells) == len(self.columns), f"{len(cells)} cells for {len(self.columns)} columns"
        self.rows.append(cells)

    def column(self, name: str) -> list[Cell]:
        """Its cells, from top to bottom."""
        index = [column.name for column in self.columns].index(name)
        return [row[index] for row in self.rows]

    def findings(self) -> dict[str, Any]:
        """As JSON takes it."""
        names = [column.name for column in self.columns]
        rows = [dict(zip(names, row, strict=True)) for row in self.rows]
        return {"title": self.title, "rows": rows, "notes": list(self.notes)}

    def rendered(self) -> rich.table.Table:
        table = rich.table.Table(title=self.title, caption="\n".join(self.notes) or None)
        table.title_justify = table.caption_justify = "left"
        for column, first in zip(self.columns, self.rows[0] if self.rows else self.columns, strict=True):
            table.add_column(column.name, justify="left" if isinstance(first, str) else "right")
        for row in self.rows:
            table.add_row(*(_text(cell, column.form) for cell, column in zip(row, self.columns, strict=True)))
        return table


def _text(cell: Cell, form: str) -> str:
    if cell is None:
        return ""
    return cell if isinstance(cell, str) else format(cell, form)
