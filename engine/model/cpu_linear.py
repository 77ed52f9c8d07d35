"""Linear layers as machine code, out of weights packed for `engine.cpu_tiles`."""

import numba
import numpy as np
import torch

from engine.cpu_code import Array, kernel, parallel_kernel
from engine.cpu_tiles import TILE_COLUMNS, TILE_ROWS, multiply_tile


def pack(weight: torch.Tensor) -> torch.Tensor:
    """[out_features, in_features] -> [panels, steps, TILE_COLUMNS, values of a step]: read from one end to the other.

    A step is a value of float32 or a pair of bfloat16, so `in_features` is even there. The last panel is filled with
    zeros.
    """
    out_features, in_features = weight.shape
    panels, width = num_panels(out_features), 2 if weight.dtype == torch.bfloat16 else 1
    if missing := panels * TILE_COLUMNS - out_features:
        weight = torch.cat((weight, weight.new_zeros(missing, in_features)))
    return weight.view(panels, TILE_COLUMNS, in_features // width, width).transpose(1, 2).contiguous()


def num_panels(out_features: int) -> int:
    return -(-out_features // TILE_COLUMNS)


@kernel
def _multiply_panels(x: Array, weight: Array, bias: Array, out: Array, first: int, last: int) -> None:
    """Panels `first` to `last` - 1 of the output; otherwise as `linear`."""
    num_rows, in_features = x.shape
    columns = out.shape[1]
    steps = weight.shape[1]
    panel_size = steps * weight.shape[2] * weight.shape[3]
    num_tiles = (num_rows + TILE_ROWS - 1) // TILE_ROWS
    partial = np.empty((TILE_ROWS, TILE_COLUMNS), out.dtype)
    for panel in range(first, last):
        column = panel * TILE_COLUMNS
        row = 0
        for tile in range(num_tiles):
            # Of nearly equal size: a tile of one row would read the whole panel for little work.
            rows = (num_rows - row + num_tiles - tile - 1) // (num_tiles - tile)
            if column + TILE_COLUMNS <= columns:
                multiply_tile(
                    rows, x, row * in_features, in_features, weight, panel * panel_size, steps,
                    bias, column, out, row * columns + column, columns,
                )  # fmt: skip
            else:
                multiply_tile(
                    rows, x, row * in_features, in_features, weight, panel * panel_size, steps,
                    bias, column, partial, 0, TILE_COLUMNS,
                )  # fmt: skip
                out[row : row + rows, column:] = partial[:rows, : columns - column]
            row += rows


@kernel
def linear(x: Array, weight: Array, bias: Array, out: Array) -> None:
    """out = x · Wᵀ + bias

    Args:
        x: [num_rows, in_features], contiguous; float32, or uint16 meaning bfloat16.
        weight: of the same type, as `pack` returns it.
        bias: [panels * TILE_COLUMNS] float32.
        out: [num_rows, out_features], contiguous, float32 or of x's type.
    """
    _multiply_panels(x, weight, bias, out, 0, len(weight))


@parallel_kernel
def linear_parallel(x: Array, weight: Array, bias: Array, out: Array, num_tasks: int) -> None:
    """As `linear`, to the bit, by threads that take a run of panels each."""
    panels = len(weight)
    for task in numba.prange(num_tasks):
        _multiply_panels(x, weight, bias, out, task * panels // num_tasks, (task + 1) * panels // num_tasks)
