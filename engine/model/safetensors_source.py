"""Weights from a folder of safetensors: one file, or shards with an index."""

import json
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open

from engine.model.errors import ModelLoadError

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def safetensors_files(folder: Path) -> list[Path]:
    """The files that hold the folder's weights, in a fixed order.

    Raises:
        ModelLoadError: there are none, or the index is damaged.
    """
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            return [folder / str(shard) for shard in sorted(shards)]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as exc:
            raise ModelLoadError(f"{index} is not a safetensors index: {exc!r}") from exc
    single = folder / "model.safetensors"
    if single.is_file():
        return [single]
    raise ModelLoadError(f"{folder} has neither model.safetensors nor model.safetensors.index.json")


class SafetensorsSource:
    """The open files of a folder.

    Raises:
        ModelLoadError: a file is missing, cut short or damaged.
    """

    def __init__(self, folder: Path) -> None:
        self._files = ExitStack()
        self._file_of: dict[str, tuple[Path, Any]] = {}
        try:
            for path in safetensors_files(folder):
                file = self._files.enter_context(_open(path))  # has keys(), but is not iterable
                self._file_of.update((name, (path, file)) for name in file.keys())  # noqa: SIM118
        except ModelLoadError:
            self._files.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._files.close()
        self._file_of.clear()

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def scalar(self, name: str) -> float | None:
        if name not in self._file_of:
            return None
        path, tensor = self._read(name)
        if tensor.numel() != 1:
            raise ModelLoadError(f"{path}: tensor {name} has the shape {list(tensor.shape)}, and should be one number")
        return float(tensor)

    def copy_into(self, name: str, out: torch.Tensor) -> None:
        path, tensor = self._read(name)
        if tensor.shape != out.shape:
            raise ModelLoadError(
                f"{path}: tensor {name} has the shape {list(tensor.shape)}, the config implies {list(out.shape)}"
            )
        out.copy_(tensor)

    def _read(self, name: str) -> tuple[Path, torch.Tensor]:
        if name not in self._file_of:
            files = ", ".join(sorted({path.name for path, _ in self._file_of.values()}))
            raise ModelLoadError(f"tensor {name} is missing (looked in {files})")
        path, file = self._file_of[name]
        try:
            tensor: torch.Tensor = file.get_tensor(name)
        except SafetensorError as exc:
            raise ModelLoadError(f"{path}: tensor {name} cannot be read: {exc}") from exc
        if tensor.dtype not in _DTYPES:
            raise ModelLoadError(f"{path}: tensor {name} is {tensor.dtype}; supported are float32, float16, bfloat16")
        return path, tensor


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except FileNotFoundError as exc:
        raise ModelLoadError(f"{path} does not exist") from exc
    except (OSError, SafetensorError) as exc:
        raise ModelLoadError(f"{path} is cut short or damaged: {exc}") from exc
