"""A GGUF file: metadata and tensor table, read in one pass, the data mapped.

The `gguf` package has a reader too, but it makes several arrays for every item of every list, which takes seconds for a
vocabulary; and a file cut short ends there in an error about array shapes. Dequantizing is left to the package.

Layout (little endian): magic, version, counts; key/value pairs; tensor infos; padding; the tensors' data.
"""

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from engine.model.errors import ModelLoadError

# Of nested lists no file of ours has any: a list is flat.
GGUFValue = int | float | bool | str | list[int] | list[float] | list[bool] | list[str]

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY, _FLOAT32 = 8, 9, 6
# Value type -> struct format.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", _FLOAT32: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """Where a tensor's bytes are."""

    name: str
    type_name: str  # F32, Q4_1, …
    shape: tuple[int, ...]  # outermost dimension first, as torch and numpy count
    offset: int  # from the beginning of the file
    nbytes: int


class GGUFFile:
    """An open GGUF file; `close` it, or use it in a `with`.

    Raises:
        ModelLoadError: missing, not GGUF, cut short, or of a version or tensor type nobody knows.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError as exc:
            raise ModelLoadError(f"{path} does not exist") from exc
        except (OSError, ValueError) as exc:  # ValueError: an empty file cannot be mapped
            raise ModelLoadError(f"{path} cannot be read: {exc}") from exc
        self.metadata: dict[str, GGUFValue] = {}
        self.tensors: dict[str, GGUFTensor] = {}
        try:
            self._read_header()
        except (struct.error, UnicodeDecodeError, _CutShort) as exc:
            self.close()
            raise ModelLoadError(f"{path} is cut short or damaged: its header is not readable") from exc
        except ModelLoadError:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Unmaps the file; idempotent. Views handed out must be gone by then."""
        self._map.close()

    def data(self, tensor: GGUFTensor) -> memoryview:
        """The tensor's bytes, not copied."""
        return memoryview(self._map)[tensor.offset : tensor.offset + tensor.nbytes]

    def _read_header(self) -> None:
        cursor = _Cursor(self._map)
        if cursor.take(4) != _MAGIC:
            raise ModelLoadError(f"{self.path} is not a GGUF file")
        version = cursor.scalar("I")
        if version not in _VERSIONS:
            raise ModelLoadError(f"{self.path} has GGUF version {version}; versions {_VERSIONS} are supported")
        num_tensors, num_values = cursor.scalar("Q"), cursor.scalar("Q")
        for _ in range(num_values):
            key = cursor.string()
            self.metadata[key] = self._value(cursor, cursor.scalar("I"))
        infos = [self._tensor_info(cursor) for _ in range(num_tensors)]

        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment <= 0:
            raise ModelLoadError(f"{self.path}: general.alignment must be above 0, not {alignment!r}")
        data_start = -(-cursor.position // alignment) * alignment
        for name, type_id, shape, offset in infos:
            tensor = self._tensor(name, type_id, shape, data_start + offset)
            if tensor.offset + tensor.nbytes > len(self._map):
                raise ModelLoadError(
                    f"{self.path} is cut short: tensor {name} ends at byte {tensor.offset + tensor.nbytes}, the file "
                    f"at {len(self._map)}"
                )
            self.tensors[name] = tensor

    def _value(self, cursor: "_Cursor", value_type: int) -> GGUFValue:
        if value_type == _STRING:
            return cursor.string()
        if value_type == _ARRAY:
            item_type, count = cursor.scalar("I"), cursor.scalar("Q")
            if item_type == _STRING:
                return [cursor.string() for _ in range(count)]
            return cursor.scalars(self._scalar_format(item_type), count)
        value = cursor.scalar(self._scalar_format(value_type))
        return _shortest_decimal(value) if value_type == _FLOAT32 else value

    def _scalar_format(self, value_type: int) -> str:
        if value_type not in _SCALARS:
            raise ModelLoadError(f"{self.path} has a metadata value of type {value_type}, which is not supported")
        return _SCALARS[value_type]

    @staticmethod
    def _tensor_info(cursor: "_Cursor") -> tuple[str, int, tuple[int, ...], int]:
        name = cursor.string()
        num_dims = cursor.scalar("I")
        innermost_first = cursor.scalars("Q", num_dims)
        type_id = cursor.scalar("I")
        return name, type_id, tuple(reversed(innermost_first)), cursor.scalar("Q")

    def _tensor(self, name: str, type_id: int, shape: tuple[int, ...], offset: int) -> GGUFTensor:
        try:
            quantization = GGMLQuantizationType(type_id)
        except ValueError as exc:
            raise ModelLoadError(f"{self.path}: tensor {name} has the unknown type {type_id}") from exc
        items_per_block, bytes_per_block = GGML_QUANT_SIZES[quantization]
        num_items = 1
        for size in shape:
            num_items *= size
        if shape and shape[-1] % items_per_block:
            raise ModelLoadError(
                f"{self.path}: tensor {name} has rows of {shape[-1]} items, no multiple of the {items_per_block} that "
                f"{quantization.name} packs together"
            )
        return GGUFTensor(name, quantization.name, shape, offset, num_items // items_per_block * bytes_per_block)


class _CutShort(Exception):
    """The file ended in the middle of a value."""


class _Cursor:
    """Reads values one after the other."""

    def __init__(self, buffer: mmap.mmap) -> None:
        self._buffer = buffer
        self.position = 0

    def take(self, nbytes: int) -> bytes:
        end = self.position + nbytes
        if end > len(self._buffer):
            raise _CutShort
        taken = self._buffer[self.position : end]
        self.position = end
        return taken

    # struct's values are of whatever type the format says.
    def scalar(self, item_format: str) -> int:
        return self.scalars(item_format, 1)[0]

    def scalars(self, item_format: str, count: int) -> list[int]:
        item_size = struct.calcsize(f"<{item_format}")
        data = self.take(count * item_size)  # before struct is asked to make a format of a wild count
        return list(struct.unpack(f"<{count}{item_format}", data))

    def string(self) -> str:
        return self.take(self.scalar("Q")).decode("utf-8")


def _shortest_decimal(value: float) -> float:
    """The decimal that was meant by a float32: 1e-05, not 9.999999747378752e-06, which is another number to float64."""
    for digits in range(1, 9):
        candidate = float(f"{value:.{digits}g}")
        if struct.unpack("<f", struct.pack("<f", candidate))[0] == value:
            return candidate
    return value
