"""Attention of a chunk of queries on a CPU with wide vectors, by `engine.cpu_tiles`.

The keys and values that the chunk sees are packed once a layer, out of their blocks. Then each head's queries go in
tiles of 8: their scores for all keys, the softmax in float32, the weighted sum of the values. A query's sums have one
order, which begins at position 0: its result does not depend, to the bit, on how the prompt was cut into chunks.
"""

from typing import Any

import numba
import numpy as np

from engine.attention.cpu_pool import LayerGeometry
from engine.attention.cpu_softmax import weigh
from engine.cpu_code import Array, as_element, kernel, parallel_kernel
from engine.cpu_tiles import TILE_COLUMNS, TILE_ROWS, multiply_tile


@kernel
def pack_kv(kv: Array, rows: Array, first: int, geometry: LayerGeometry, keys: Array, values: Array) -> None:
    """Packs the keys and values of a run of positions as right operands of `multiply_tile`.

    Args:
        kv: the layer, flat.
        rows: [num_keys] int64, where the positions' keys begin.
        first: positions before it are seen by no query, and are zero.
        keys: [num_kv_heads, panels of TILE_COLUMNS positions, steps, TILE_COLUMNS, values of a step]: along head_dim.
        values: [num_kv_heads, panels of TILE_COLUMNS dimensions, steps, TILE_COLUMNS, values of a step]: along
            positions, as many as `keys` has; those past the last are zero.
    """
    num_kv_heads, panels, steps, _, width = keys.shape
    dimension_panels = values.shape[1]
    for k in range(num_kv_heads):
        for i in range(panels * TILE_COLUMNS):
            panel, column = i // TILE_COLUMNS, i % TILE_COLUMNS
            step, place = i // width, i % width
            if i < first or i >= len(rows):
                keys[k, panel, :, column] = 0
                values[k, :, step, :, place] = 0
                continue
            key = rows[i] + k * geometry.head_stride
            value = key + geometry.side_stride
            for s in range(steps):
                for w in range(width):
                    keys[k, panel, s, column, w] = kv[key + s * width + w]
            for p in range(dimension_panels):
                for c in range(TILE_COLUMNS):
                    values[k, p, step, c, place] = kv[value + p * TILE_COLUMNS + c]


@kernel
def _attend_tile(
    q: Array, first_position: int, keys: Array, values: Array, window: int, scale: Any, out: Array, head: int,
    first_query: int,
) -> None:  # fmt: skip
    """Up to TILE_ROWS queries of one head; otherwise as `chunk_attention`."""
    num_queries, num_heads, head_dim = q.shape
    num_kv_heads, panels, key_steps, _, width = keys.shape
    kv_head = head * num_kv_heads // num_heads
    num_rows = min(TILE_ROWS, num_queries - first_query)
    # The panels that any of these queries sees: from the first key of the first one to the last one's own.
    position = first_position + first_query
    first_panel = max(0, position - window + 1) // TILE_COLUMNS
    num_panels = (position + num_rows - 1) // TILE_COLUMNS + 1 - first_panel
    begin, padded = first_panel * TILE_COLUMNS, num_panels * TILE_COLUMNS
    scores, weights = np.empty((num_rows, padded), np.float32), np.zeros((num_rows, padded), q.dtype)
    sums, zeros = np.empty((num_rows, head_dim), np.float32), np.zeros(TILE_COLUMNS, np.float32)
    totals = np.empty(num_rows, np.float32)

    query, stride = (first_query * num_heads + head) * head_dim, num_heads * head_dim
    panel_size = key_steps * TILE_COLUMNS * width
    for panel in range(num_panels):
        place = (kv_head * panels + first_panel + panel) * panel_size
        multiply_tile(
            num_rows, q, query, stride, keys, place, key_steps, zeros, 0, scores, panel * TILE_COLUMNS, padded
        )
    for r in range(num_rows):
        end = position + r + 1 - begin
        first = max(0, end - window)
        totals[r] = weigh(scores[r, first:end], scale, weights[r, first:end])
    value_steps = values.shape[2]
    for panel in range(values.shape[1]):
        place = ((kv_head * values.shape[1] + panel) * value_steps + begin // width) * TILE_COLUMNS * width
        multiply_tile(
            num_rows, weights, 0, padded, values, place, padded // width, zeros, 0, sums, panel * TILE_COLUMNS, head_dim
        )
    for r in range(num_rows):
        inverse = np.float32(1.0) / totals[r]
        result = out[first_query + r, head]
        for d in range(head_dim):
            result[d] = as_element(sums[r, d] * inverse, result[d])


@kernel
def chunk_attention(
    q: Array, first_position: int, keys: Array, values: Array, window: int, scale: Any, out: Array
) -> None:
    """Attention of a request's queries at neighbouring positions.

    Args:
        q, out: [num_queries, num_heads, head_dim], contiguous; float32, or uint16 meaning bfloat16; head_dim is a
            multiple of TILE_COLUMNS.
        first_position: of the first query, counted from the first key that is packed.
        keys, values: as `pack_kv` packs them, of the same type; as far as the last query's own.
        window: keys that a query sees at most.
        scale: float32.
    """
    for head in range(q.shape[1]):
        for query in range(0, len(q), TILE_ROWS):
            _attend_tile(q, first_position, keys, values, window, scale, out, head, query)


@parallel_kernel
def chunk_attention_parallel(
    q: Array, first_position: int, keys: Array, values: Array, window: int, scale: Any, out: Array
) -> None:
    """As `chunk_attention`, to the bit, a task for each tile."""
    num_tiles = (len(q) + TILE_ROWS - 1) // TILE_ROWS
    for task in numba.prange(num_tiles * q.shape[1]):
        # Threads take equal runs of tasks, and the last queries see the most: heads outside, so that runs are alike.
        _attend_tile(
            q, first_position, keys, values, window, scale, out, task // num_tiles, task % num_tiles * TILE_ROWS
        )
