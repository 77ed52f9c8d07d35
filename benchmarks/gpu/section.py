"""What a section of the script finds: checks that hold or do not, and figures."""

import json
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
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


class SectionOver(Exception):
    """The device answers no more: whatever is tried next in this process fails as well."""


@dataclass(slots=True)
class Section:
    """One section's findings. `notes` say what could not be tried, and why.

    With `path` each finding is on disk at once: a section that is killed loses nothing that it has found.
    """

    name: str
    checks: list[Check] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0
    path: Path | None = None

    def check(self, name: str, holds: bool, detail: object = "") -> None:
        self.checks.append(Check(name, bool(holds), str(detail)))
        self._write()

    def figure(self, name: str, value: float, unit: str) -> None:
        self.figures.append(Figure(name, float(value), unit))
        self._write()

    def note(self, text: str) -> None:
        self.notes.append(text)
        self._write()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """What goes wrong within is a check that does not hold; the section goes on.

        Raises:
            SectionOver: it cannot.
        """
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            self.check(f"{name} ran to its end", False, f"{type(error).__name__}: {str(error)[:300]}")
            if _is_device_lost():
                raise SectionOver(f"the device is lost since {name}") from error

    @property
    def holds(self) -> bool:
        return all(check.holds for check in self.checks)

    def findings(self) -> dict[str, object]:
        """As plain values."""
        return {name: value for name, value in asdict(self).items() if name != "path"}

    def _write(self) -> None:
        if self.path is not None:
            half = self.path.with_suffix(".half")
            half.write_text(json.dumps(self.findings()))
            half.replace(self.path)

    @classmethod
    def read(cls, path: Path) -> Self:
        """
        Raises:
            OSError, ValueError: the section's process has not written anything.
        """
        values = json.loads(path.read_text())
        return cls(
            values["name"],
            [Check(**check) for check in values["checks"]],
            [Figure(**figure) for figure in values["figures"]],
            values["notes"],
            values["seconds"],
        )


def _is_device_lost() -> bool:
    import torch

    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


@dataclass(frozen=True, slots=True)
class Setting:
    """What a section is run on."""

    device: str  # "cuda:0", or "cpu"
    folder: Path  # for files of its own; its caller removes it

    @property
    def on_gpu(self) -> bool:
        return self.device != "cpu"
