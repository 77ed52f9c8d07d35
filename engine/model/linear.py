"""y = x · Wᵀ + b, with the weight packed once for the library that multiplies."""

import torch
import torch.nn.functional as F

_FEWEST_ROWS = 4


class Linear:
    """A linear layer for inference.

    On a CPU, oneDNN gets the weight in its own blocked layout, packed once at load instead of at every call. Its
    results for a row then do not depend on how many other rows there are, except for a single row, which takes another
    kernel. Four rows take less time than one there: so up to three are filled up to four, and a token's logits are the
    same, to the bit, with and without batch mates.

    Args:
        weight: [out_features, in_features], float32 or bfloat16; may be dropped by the caller afterwards.
        bias: [out_features], of the same dtype.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None, *, packed: bool | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        self._bias = bias
        self._packed = can_pack(weight) if packed is None else packed
        self._filling = weight.new_zeros(_FEWEST_ROWS, self.in_features)
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight) if self._packed else weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[num_tokens, in_features] -> [num_tokens, out_features], contiguous."""
        if not self._packed:
            return F.linear(x, self._weight, self._bias)
        num_tokens = len(x)
        if num_tokens < _FEWEST_ROWS:
            x = torch.cat((x, self._filling[num_tokens:]))
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return out[:num_tokens]


def can_pack(weight: torch.Tensor) -> bool:
    """Whether oneDNN can take this weight here."""
    if weight.device.type != "cpu" or not torch._C._has_mkldnn:
        return False
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32
