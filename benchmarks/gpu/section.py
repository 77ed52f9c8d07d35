"""What a section of the script finds: checks that hold or do not, and figures."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Self


@dataclass(frozen=True, slots=True)
class Check:
    """Something that must hold."""

    name: str
    holds: bool
    detail: str  # the number it was decided on


@dataclass(frozen=True, slots=True)
class Figure:
    """Something measured."""

    name: str
    value: float
    unit: str


@dataclass(slots=True)
class Section:
    """One section's findings. `notes` say what could not be tried, and why."""

    name: str
    checks: list[Check] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def check(self, name: str, holds: bool, detail: object = "") -> None:
        self.checks.append(Check(name, bool(holds), str(detail)))

    def figure(self, name: str, value: float, unit: str) -> None:
        self.figures.append(Figure(name, float(value), unit))

    def note(self, text: str) -> None:
        self.notes.append(text)

    @property
    def holds(self) -> bool:
        return all(check.holds for check in self.checks)

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> Self:
        """
        Raises:
            OSError, ValueError: the section's process has not written it, or not to the end.
        """
        values = json.loads(path.read_text())
        return cls(
            values["name"],
            [Check(**check) for check in values["checks"]],
            [Figure(**figure) for figure in values["figures"]],
            values["notes"],
            values["seconds"],
        )


@dataclass(frozen=True, slots=True)
class Setting:
    """What a section is run on."""

    device: str  # "cuda:0", or "cpu"
    folder: Path  # for files of its own; its caller removes it

    @property
    def on_gpu(self) -> bool:
        return self.device != "cpu"
