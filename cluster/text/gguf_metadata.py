"""The metadata of a GGUF file, read on its own.

A gateway needs a model's vocabulary, not its weights: this reads the key-value head of the file in a twentieth of a
second and leaves the tensors alone.
"""

import mmap
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

_SCALARS: dict[int, str] = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING = 8
_ARRAY = 9


def read_gguf_metadata(path: Path) -> dict[str, Any]:
    """All key-value pairs in the head of a GGUF file: scalars, strings, and lists of them.

    Raises:
        ValueError: not a GGUF file of version 2 or 3, or it ends within its head.
    """
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ValueError(f"{path.name} is not a GGUF file: it does not begin with the bytes GGUF")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                return _Head(data, path.name).read()
            except (struct.error, IndexError, UnicodeDecodeError) as exc:
                raise ValueError(f"{path.name} is cut off or damaged: its metadata cannot be read ({exc})") from exc


class _Head:
    """A cursor over the head of the file."""

    def __init__(self, data: mmap.mmap, name: str) -> None:
        self._data = data
        self._name = name
        self._at = 4

    def read(self) -> dict[str, Any]:
        version = self._scalar("I")
        if version not in (2, 3):
            raise ValueError(f"{self._name} has GGUF version {version}; versions 2 and 3 can be read")
        self._scalar("Q")  # number of tensors
        num_pairs = self._scalar("Q")
        return {self._string(): self._value(self._scalar("I")) for _ in range(num_pairs)}

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._scalar(self._format(kind))
        item, length = self._scalar("I"), self._scalar("Q")
        if item in (_STRING, _ARRAY):
            read: Callable[[], Any] = self._string if item == _STRING else lambda: self._value(_ARRAY)
            return [read() for _ in range(length)]
        values = struct.unpack_from(f"<{length}{self._format(item)}", self._data, self._at)
        self._at += struct.calcsize(f"<{length}{self._format(item)}")
        return list(values)

    def _format(self, kind: int) -> str:
        if kind not in _SCALARS:
            raise ValueError(f"{self._name} is damaged: it holds a value of the unknown type {kind}")
        return _SCALARS[kind]

    def _scalar(self, fmt: str) -> Any:
        (value,) = struct.unpack_from("<" + fmt, self._data, self._at)
        self._at += struct.calcsize("<" + fmt)
        return value

    def _string(self) -> str:
        length = self._scalar("Q")
        end = self._at + length
        if end > len(self._data):
            raise IndexError(f"a string of {length} bytes passes the end of the file")
        text = self._data[self._at : end].decode("utf-8")
        self._at = end
        return text
