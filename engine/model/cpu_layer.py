"""What a layer does between its matrix products, as machine code: one pass over memory each, whatever the batch.

torch takes some eight calls for a norm and twelve for a rotation; with a batch of one request their overhead, and with
a long prompt their passes over memory, are a good part of a step. Roundings are where torch has them: in bfloat16 every
result of an operation is one.
"""

from typing import Any

import numpy as np

from engine.cpu_code import Array, as_element, as_float, kernel
from engine.cpu_math import exp_below_zero
from engine.cpu_sums import sum_of_squares


@kernel
def rms_norm(x: Array, weight: Array, eps: Any, out: Array) -> None:
    """x / √(mean(x²) + eps) · weight

    Args:
        x, out: [num_rows, size], contiguous, of one type.
        weight: [size], of the same.
        eps: float32.
    """
    num_rows, size = x.shape
    for i in range(num_rows):
        total = sum_of_squares(x, i * size, size)
        scale = np.float32(1.0) / np.sqrt(total / np.float32(size) + eps)
        for j in range(size):
            scaled = as_element(as_float(x[i, j]) * scale, x[i, j])
            out[i, j] = as_element(as_float(scaled) * as_float(weight[j]), x[i, j])


@kernel
def add_rms_norm(hidden: Array, delta: Array, weight: Array, eps: Any, out: Array) -> None:
    """hidden += delta, in place; then `rms_norm` of it, by the same arithmetic.

    Args:
        hidden, delta, out: [num_rows, size], contiguous, of one type.
    """
    num_rows, size = hidden.shape
    for i in range(num_rows):
        for j in range(size):
            hidden[i, j] = as_element(as_float(hidden[i, j]) + as_float(delta[i, j]), hidden[i, j])
        total = sum_of_squares(hidden, i * size, size)
        scale = np.float32(1.0) / np.sqrt(total / np.float32(size) + eps)
        for j in range(size):
            scaled = as_element(as_float(hidden[i, j]) * scale, hidden[i, j])
            out[i, j] = as_element(as_float(scaled) * as_float(weight[j]), hidden[i, j])


@kernel
def rotate(heads: Array, num_rotated: int, cos: Array, sin: Array) -> None:
    """Turns pairs of dimensions (i, i + head_dim / 2) of the first heads of each row, in place.

    Args:
        heads: [num_rows, num_heads, head_dim], contiguous.
        num_rotated: how many heads.
        cos, sin: [num_rows, head_dim / 2] float32.
    """
    num_rows, _, head_dim = heads.shape
    half = head_dim // 2
    for i in range(num_rows):
        for h in range(num_rotated):
            first, second = heads[i, h, :half], heads[i, h, half:]
            for d in range(half):
                a, b = as_float(first[d]), as_float(second[d])
                first[d] = as_element(a * cos[i, d] - b * sin[i, d], heads[i, h, d])
                second[d] = as_element(b * cos[i, d] + a * sin[i, d], heads[i, h, d])


@kernel
def silu_and_mul(gate_up: Array, out: Array) -> None:
    """silu(gate) · up, where silu(x) = x / (1 + e⁻ˣ).

    Args:
        gate_up: [num_rows, 2 * size], contiguous, gates first.
        out: [num_rows, size], contiguous, of the same type.
    """
    num_rows, size = out.shape
    for i in range(num_rows):
        gates, ups, products = gate_up[i, :size], gate_up[i, size:], out[i]
        for j in range(size):
            gate = as_float(gates[j])
            power = exp_below_zero(-abs(gate))
            sigmoid = (np.float32(1.0) if gate >= np.float32(0.0) else power) / (np.float32(1.0) + power)
            silu = as_element(gate * sigmoid, gates[j])
            products[j] = as_element(as_float(silu) * as_float(ups[j]), gates[j])
