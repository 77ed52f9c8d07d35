"""Where weights are read from: one tensor at a time, under the names that Hugging Face gives them."""

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

import torch

from engine.model.config import ModelConfig

# Not a weight: what the rotary frequencies are divided by, [head_dim / 2]; only GGUF files have it.
ROPE_FACTORS = "rope_freqs.weight"


class TensorSource(AbstractContextManager["TensorSource"], Protocol):
    """An open checkpoint. Implementations: `SafetensorsSource` (a folder), `GGUFSource` (one file)."""

    def __contains__(self, name: str) -> bool: ...

    def scalar(self, name: str) -> float | None:
        """A tensor that is one number; None if there is none of that name.

        Raises:
            ModelLoadError: it is more than one number, or damaged.
        """
        ...

    def copy_into(self, name: str, out: torch.Tensor) -> None:
        """Reads a tensor into `out`, converted to its dtype.

        Raises:
            ModelLoadError: missing, of another shape than `out`, of a type that is not supported, or damaged.
        """
        ...


def open_source(path: Path, config: ModelConfig) -> TensorSource:
    """Opens the weights of the model at `path`, whose description is `config`.

    Raises:
        ModelLoadError: a file is missing or damaged.
    """
    # Here, not above: only one of the two libraries is needed.
    if path.is_dir():
        from engine.model.safetensors_source import SafetensorsSource

        return SafetensorsSource(path)
    from engine.model.gguf_source import GGUFSource

    return GGUFSource(path, config)


def weight_files(path: Path) -> list[Path]:
    """The files that `open_source` reads, in a fixed order.

    Raises:
        ModelLoadError: there are none.
    """
    if path.is_dir():
        from engine.model.safetensors_source import safetensors_files

        return safetensors_files(path)
    return [path]
