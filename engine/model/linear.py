"""y = x · Wᵀ + b, with the weight laid out once for whatever multiplies.

Three ways, of which the first that can be had is taken: machine code of our own (`engine.cpu_tiles`), oneDNN with its
own packed layout, torch. On a CPU, by the first two, a token's logits are the same, to the bit, with and without batch
mates.
"""

from typing import Protocol

import torch
import torch.nn.functional as F

from engine.cpu_code import MAX_THREADS, as_numpy, launch
from engine.cpu_tiles import TILE_COLUMNS, TILE_ROWS, has_tiles
from engine.model import cpu_linear


class Linear(Protocol):
    """A linear layer for inference."""

    in_features: int
    out_features: int

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[num_tokens, in_features] -> [num_tokens, out_features], contiguous, of x's dtype or float32."""
        ...


def make_linear(weight: torch.Tensor, bias: torch.Tensor | None = None, *, to_float32: bool = False) -> Linear:
    """The fastest that can be had here.

    Args:
        weight: [out_features, in_features], float32 or bfloat16; may be dropped by the caller afterwards.
        bias: [out_features], of the same dtype.
        to_float32: what it returns, instead of the weight's dtype; if possible the sums are not rounded in between.
    """
    if TiledLinear.takes(weight):
        return TiledLinear(weight, bias, torch.float32 if to_float32 else weight.dtype)
    linear = OneDnnLinear(weight, bias) if OneDnnLinear.takes(weight) else PlainLinear(weight, bias)
    return Widened(linear) if to_float32 and weight.dtype != torch.float32 else linear


# Waking threads takes 70 µs and more. A tile of rows takes about as long as reading the weights: 400 µs for 10 MB.
_LEAST_SHARED_BYTES = 10 << 20


class TiledLinear:
    """By `engine.cpu_tiles`; by several threads, to the same bits, where that is worth it."""

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None, out_dtype: torch.dtype | None = None
    ) -> None:
        self.out_features, self.in_features = weight.shape
        self._out_dtype = out_dtype or weight.dtype
        packed = as_numpy(cpu_linear.pack(weight))
        offsets = torch.zeros(len(packed) * TILE_COLUMNS)
        if bias is not None:
            offsets[: self.out_features] = bias
        self.packed = packed, offsets.numpy()  # weight and bias, as `cpu_linear.linear` takes them
        self.num_threads = min(torch.get_num_threads(), MAX_THREADS)

    @staticmethod
    def takes(weight: torch.Tensor) -> bool:
        """A pair of bfloat16 is multiplied at once, so a row must have pairs."""
        pairs = weight.dtype != torch.bfloat16 or weight.shape[1] % 2 == 0
        return weight.is_cpu and has_tiles(weight.dtype) and pairs

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        num_bytes_read = -(-len(x) // TILE_ROWS) * self.packed[0].nbytes
        return self._multiply(x, self.num_threads if num_bytes_read >= _LEAST_SHARED_BYTES else 1)

    def warm_up(self, dtype: torch.dtype) -> None:
        """Compiles, or loads from disk, all that a call may need, for an `x` of this dtype."""
        x = torch.zeros(1, self.in_features, dtype=dtype)
        for num_threads in {1, self.num_threads}:
            self._multiply(x, num_threads)

    def _multiply(self, x: torch.Tensor, num_threads: int) -> torch.Tensor:
        out = torch.empty(len(x), self.out_features, dtype=self._out_dtype)
        arrays = as_numpy(x.contiguous()), *self.packed, as_numpy(out)
        if num_threads == 1:
            cpu_linear.linear(*arrays)
        else:
            with launch(num_threads):
                cpu_linear.linear_parallel(*arrays, num_threads)
        return out


_FEWEST_ROWS = 4


class OneDnnLinear:
    """By oneDNN, with the weight in its own blocked layout, packed once at load instead of at every call.

    Its results for a row do not depend on how many other rows there are, except for a single row, which takes another
    kernel. Four rows take less time than one there: so up to three are filled up to four.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        self._bias = bias
        self._filling = weight.new_zeros(_FEWEST_ROWS, self.in_features)
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight)

    @staticmethod
    def takes(weight: torch.Tensor) -> bool:
        if not weight.is_cpu or not torch._C._has_mkldnn or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
            return False
        if weight.dtype == torch.bfloat16:
            return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
        return weight.dtype == torch.float32

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        num_tokens = len(x)
        if num_tokens < _FEWEST_ROWS:
            x = torch.cat((x, self._filling[num_tokens:]))
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return out[:num_tokens]


class PlainLinear:
    """By torch, with the weight as it is."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        self._weight, self._bias = weight, bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self._weight, self._bias)


class Widened:
    """A linear layer whose results are turned into float32."""

    def __init__(self, linear: Linear) -> None:
        self.out_features, self.in_features = linear.out_features, linear.in_features
        self._linear = linear

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._linear(x).to(torch.float32)
