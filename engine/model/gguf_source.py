"""Weights from one GGUF file, dequantized as they are read."""

import re
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize

from engine.model.config import ModelConfig
from engine.model.errors import ModelLoadError
from engine.model.gguf_file import GGUFFile
from engine.model.tensor_source import ROPE_FACTORS

# Q5_*: what quantizers of Q4_K files fall back to where a row is no multiple of 256.
_SUPPORTED_TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")
_TOP_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_LAYER_NAME = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")
# Dequantized at once: bounds the float32 copy beside the weights.
_ITEMS_AT_ONCE = 1 << 24


def gguf_name(name: str) -> str:
    """What GGUF calls the tensor that Hugging Face calls `name`."""
    if name == ROPE_FACTORS:
        return name
    if match := _LAYER_NAME.fullmatch(name):
        return f"blk.{match[1]}.{_LAYER_NAMES[match[2]]}.{match[3]}"
    stem, _, kind = name.rpartition(".")
    return f"{_TOP_NAMES[stem]}.{kind}"


class GGUFSource:
    """An open GGUF file.

    Raises:
        ModelLoadError: missing, cut short or damaged.
    """

    def __init__(self, path: Path, config: ModelConfig) -> None:
        self._file = GGUFFile(path)
        self._config = config

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._file.close()

    def __contains__(self, name: str) -> bool:
        return gguf_name(name) in self._file.tensors

    def scalar(self, name: str) -> float | None:
        return None  # the format knows no scales of a cache

    def copy_into(self, name: str, out: torch.Tensor) -> None:
        path = self._file.path
        tensor = self._file.tensors.get(gguf_name(name))
        if tensor is None:
            raise ModelLoadError(f"{path}: tensor {gguf_name(name)} is missing")
        if tensor.type_name not in _SUPPORTED_TYPES:
            raise ModelLoadError(
                f"{path}: tensor {tensor.name} is {tensor.type_name}; supported are {', '.join(_SUPPORTED_TYPES)}"
            )
        if tensor.shape != tuple(out.shape):
            raise ModelLoadError(
                f"{path}: tensor {tensor.name} has the shape {list(tensor.shape)}, the metadata implies "
                f"{list(out.shape)}"
            )
        quantization = GGMLQuantizationType[tensor.type_name]
        rows_shape = (out.shape[0], -1) if out.dim() == 2 else (1, -1)
        with self._file.data(tensor) as data:
            rows = self._in_our_order(name, np.frombuffer(data, np.uint8).reshape(rows_shape))
            # A vector is one row of data, but out's only dimension.
            out_rows = out if out.dim() == 2 else out[None]
            step = max(1, _ITEMS_AT_ONCE // out_rows.shape[1])
            for first in range(0, len(rows), step):
                values = _dequantized(rows[first : first + step], quantization)
                out_rows[first : first + step] = torch.from_numpy(values)
            del rows  # its view must be gone before the file can be closed

    def _in_our_order(self, name: str, rows: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        """Undoes GGUF's reordering of the rows of q and k in files of architecture `llama`.

        Those rotate neighbouring dimensions (0, 1), (2, 3), … together, where we, as Hugging Face, rotate (0, d/2),
        (1, d/2 + 1), …: the rows of each head were reordered accordingly. Rows are packed whole, so bytes will do.
        """
        if self._config.architecture != "llama" or not (match := re.search(r"\.self_attn\.([qk])_proj\.(\w+)$", name)):
            return rows
        num_heads = self._config.num_heads if match[1] == "q" else self._config.num_kv_heads
        by_row = rows.reshape(num_heads, self._config.head_dim // 2, 2, -1)  # a bias: one item a row
        return np.ascontiguousarray(by_row.swapaxes(1, 2)).reshape(rows.shape)


def _dequantized(rows: npt.NDArray[np.uint8], quantization: GGMLQuantizationType) -> npt.NDArray[np.float32]:
    values: npt.NDArray[np.float32] = dequantize(rows, quantization)
    # F32 comes back as a view of the mapped file, read-only: torch wants to own what it wraps.
    return values if values.flags.writeable and values.flags.owndata else values.copy()
