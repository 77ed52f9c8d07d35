"""Root mean square layer normalization (Zhang and Sennrich, 2019)."""

import numpy as np
import torch
import torch.nn.functional as F

from engine.cpu_code import as_numpy
from engine.model import cpu_layer


class RMSNorm:
    """x / √(mean(x²) + eps) · weight, over the last dimension; the mean in float32."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self.weight = weight
        self.eps = eps
        self._cpu_weight = as_numpy(weight) if weight.is_cpu else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._cpu_weight is None:
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        x = x.contiguous()
        out = torch.empty_like(x)
        rows, out_rows = (as_numpy(tensor.view(-1, x.shape[-1])) for tensor in (x, out))
        cpu_layer.rms_norm(rows, self._cpu_weight, np.float32(self.eps), out_rows)
        return out

    def after_adding(self, hidden: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
        """hidden += delta, in place; the norm of what comes out. Both [num_tokens, hidden_size], contiguous."""
        if self._cpu_weight is None:
            hidden += delta
            return self(hidden)
        out = torch.empty_like(hidden)
        arrays = (as_numpy(hidden), as_numpy(delta), self._cpu_weight, np.float32(self.eps), as_numpy(out))
        cpu_layer.add_rms_norm(*arrays)
        return out
