"""One layer of a decoder: what it computes around its attention.

Both ways keep the residual stream, `hidden`, and what the step before has found but not added yet, `delta`: so that one
pass over memory adds and norms. Both are [num_tokens, hidden_size].
"""

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from engine.attention.backend import UNSCALED, KVScales
from engine.cpu_code import as_numpy
from engine.model import cpu_layer
from engine.model.linear import Linear
from engine.model.norm import RMSNorm
from engine.model.rope import rotate

QKV = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) · up: [num_tokens, 2 * intermediate_size], gates first -> [num_tokens, intermediate_size]."""
    if not gate_up.is_cpu:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)
    out = gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)
    cpu_layer.silu_and_mul(as_numpy(gate_up), as_numpy(out))
    return out


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    """The weights of a layer; those of q, k and v, and of gate and up, lie one below the other in one matrix."""

    input_norm: RMSNorm
    qkv: Linear
    q_norm: RMSNorm | None
    k_norm: RMSNorm | None
    o: Linear
    post_attention_norm: RMSNorm
    gate_up: Linear
    down: Linear

    @property
    def linears(self) -> tuple[Linear, ...]:
        return self.qkv, self.o, self.gate_up, self.down


class DecoderLayer(Protocol):
    """A layer of the Llama family, without its attention."""

    @property
    def weights(self) -> LayerWeights: ...
    @property
    def window(self) -> int | None: ...
    @property
    def kv_scales(self) -> KVScales: ...

    def before_attention(self, hidden: torch.Tensor, delta: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> QKV:
        """hidden += delta, in place; the queries, keys and values that follow.

        Args:
            cos, sin: as `RotaryEmbedding.cos_sin` returns them.

        Returns:
            q: [num_tokens, num_heads, head_dim]; k, v: [num_tokens, num_kv_heads, head_dim]. Queries and keys are
                turned; any of them may be a view.
        """
        ...

    def after_attention(self, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """hidden += the projection of `attended`, in place; the delta that follows.

        Args:
            attended: [num_tokens, num_heads, head_dim].
        """
        ...


@dataclass(frozen=True, slots=True, eq=False)
class PlainLayer:
    """One operation after the other. Implements `DecoderLayer`."""

    weights: LayerWeights
    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None = None
    kv_scales: KVScales = UNSCALED

    def before_attention(self, hidden: torch.Tensor, delta: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> QKV:
        weights, num_heads = self.weights, self.num_heads
        num_rotated = num_heads + self.num_kv_heads
        x = weights.input_norm.after_adding(hidden, delta)
        heads = weights.qkv(x).view(len(x), num_rotated + self.num_kv_heads, self.head_dim)
        v = heads[:, num_rotated:]
        if weights.q_norm is not None and weights.k_norm is not None:
            q, k = heads[:, :num_heads], heads[:, num_heads:num_rotated]
            heads = torch.cat((weights.q_norm(q), weights.k_norm(k)), dim=1)
        qk = rotate(heads, num_rotated, cos, sin)  # both at once: a head is a head
        return qk[:, :num_heads], qk[:, num_heads:], v

    def after_attention(self, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        weights = self.weights
        projected = weights.o(attended.reshape(len(attended), -1))
        x = weights.post_attention_norm.after_adding(hidden, projected)
        return weights.down(silu_and_mul(weights.gate_up(x)))
