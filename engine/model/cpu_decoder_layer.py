"""A decoder layer on a CPU as two kernels, one on each side of its attention.

A call from Python costs some ten microseconds, and with few requests the eight of a layer cost a third of what they
compute.
"""

from typing import Any

import numpy as np
import torch

from engine.attention.backend import KVScales
from engine.cpu_code import Array, as_numpy, kernel
from engine.model.cpu_layer import add_rms_norm, rotate, silu_and_mul
from engine.model.cpu_linear import linear
from engine.model.decoder_layer import QKV, LayerWeights, PlainLayer
from engine.model.linear import TiledLinear


@kernel
def _before_attention(
    hidden: Array, delta: Array, norm: Array, eps: Any, qkv: Array, qkv_bias: Array, num_rotated: int, cos: Array,
    sin: Array, heads: Array,
) -> None:  # fmt: skip
    """heads: [num_tokens, all heads, head_dim], the result; otherwise as the kernels it calls."""
    normed = np.empty_like(hidden)
    add_rms_norm(hidden, delta, norm, eps, normed)
    linear(normed, qkv, qkv_bias, heads.reshape(len(heads), heads.shape[1] * heads.shape[2]))
    rotate(heads, num_rotated, cos, sin)


@kernel
def _after_attention(
    hidden: Array, attended: Array, o: Array, o_bias: Array, norm: Array, eps: Any, gate_up: Array,
    gate_up_bias: Array, down: Array, down_bias: Array, intermediate_size: int, delta: Array,
) -> None:  # fmt: skip
    """delta: the result; otherwise as the kernels it calls."""
    num_tokens = len(hidden)
    projected, normed = np.empty_like(hidden), np.empty_like(hidden)
    linear(attended, o, o_bias, projected)
    add_rms_norm(hidden, projected, norm, eps, normed)
    gates_and_ups = np.empty((num_tokens, 2 * intermediate_size), hidden.dtype)
    linear(normed, gate_up, gate_up_bias, gates_and_ups)
    activated = np.empty((num_tokens, intermediate_size), hidden.dtype)
    silu_and_mul(gates_and_ups, activated)
    linear(activated, down, down_bias, delta)


class FusedLayer:
    """Implements `DecoderLayer` for one thread; computes what `PlainLayer` computes, by the same kernels."""

    def __init__(self, plain: PlainLayer) -> None:
        self.weights: LayerWeights = plain.weights
        self.window: int | None = plain.window
        self.kv_scales: KVScales = plain.kv_scales
        self._places = plain.num_heads, plain.num_heads + plain.num_kv_heads  # of the first key and value head
        self._heads = (plain.num_heads + 2 * plain.num_kv_heads, plain.head_dim)
        weights = plain.weights
        qkv, o, gate_up, down = _tiled(weights)
        first, second = weights.input_norm, weights.post_attention_norm
        self._before = (as_numpy(first.weight), np.float32(first.eps), *qkv.packed)
        self._after = (
            *o.packed, as_numpy(second.weight), np.float32(second.eps), *gate_up.packed, *down.packed, down.in_features
        )  # fmt: skip

    @staticmethod
    def takes(layer: PlainLayer) -> bool:
        weights = layer.weights
        tiled = _tiled(weights)
        one_thread = all(one.num_threads == 1 for one in tiled)
        return len(tiled) == len(weights.linears) and one_thread and weights.q_norm is None

    def before_attention(self, hidden: torch.Tensor, delta: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> QKV:
        heads = hidden.new_empty(len(hidden), *self._heads)
        angles = cos[:, 0].numpy(), sin[:, 0].numpy()
        _before_attention(as_numpy(hidden), as_numpy(delta), *self._before, self._places[1], *angles, as_numpy(heads))
        first_k, first_v = self._places
        return heads[:, :first_k], heads[:, first_k:first_v], heads[:, first_v:]

    def after_attention(self, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        delta = torch.empty_like(hidden)
        attended = attended.reshape(len(attended), -1)
        _after_attention(as_numpy(hidden), as_numpy(attended), *self._after, as_numpy(delta))
        return delta


def _tiled(weights: LayerWeights) -> list[TiledLinear]:
    """Those of the layer that are."""
    return [linear for linear in weights.linears if isinstance(linear, TiledLinear)]
