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
def _pack_keys(words: Array, starts: Array, first: int, keys: Array) -> None:
    """One head's keys; `starts` are in words. Otherwise as `pack_kv`."""
    panels, steps, _ = keys.shape
    for panel in range(panels):
        for column in range(TILE_COLUMNS):
            i = panel * TILE_COLUMNS + column
            target = keys[panel, :, column]
            if i < first or i >= len(starts):
                target[:] = 0
                continue
            source = words[starts[i] : starts[i] + steps]
            for s in range(steps):
                target[s] = source[s]


@kernel
def _pack_values(kv: Array, starts: Array, first: int, values: Array) -> None:
    """One head's values; `starts` are in kv's elements. Otherwise as `pack_kv`."""
    panels, steps, _ = values.shape
    width = 4 // kv.itemsize
    head_dim = panels * TILE_COLUMNS
    nothing = np.zeros(head_dim, kv.dtype)
    for step in range(steps):
        low = high = nothing  # the one or two positions of a step
        i = step * width
        if first <= i < len(starts):
            low = kv[starts[i] : starts[i] + head_dim]
        i += width - 1
        if first <= i < len(starts):
            high = kv[starts[i] : starts[i] + head_dim]
        for panel in range(panels):
            target = values[panel, step]
            for c in range(TILE_COLUMNS):
                word = np.uint32(high[panel * TILE_COLUMNS + c])
                if width == 2:
                    word = (word << np.uint32(16)) | np.uint32(low[panel * TILE_COLUMNS + c])
                target[c] = word


@kernel
def pack_kv(kv: Array, rows: Array, first: int, geometry: LayerGeometry, keys: Array, values: Array) -> None:
    """Packs the keys and values of a run of positions as right operands of `multiply_tile`, word by word.

    A word, of 32 bits, is what a lane multiplies in a step: one float32, or two bfloat16.

    Args:
        kv: the layer, flat: uint16 meaning bfloat16, or uint32 meaning float32.
        rows: [num_keys] int64, where the positions' keys begin.
        first: positions before it are seen by no query, and are zero.
        keys: [num_kv_heads, panels of TILE_COLUMNS positions, steps along head_dim, TILE_COLUMNS] uint32.
        values: [num_kv_heads, panels of TILE_COLUMNS dimensions, steps along positions, TILE_COLUMNS] uint32: as many
            positions as `keys` has; those past the last are zero.
    """
    width = 4 // kv.itemsize
    words = kv.view(np.uint32)
    for k in range(geometry.num_kv_heads):
        starts = rows + k * geometry.head_stride
        _pack_keys(words, starts // width, first, keys[k])
        _pack_values(kv, starts + geometry.side_stride, first, values[k])


@kernel
def _attend_tile(
    q: Array, first_position: int, keys: Array, values: Array, window: int, scale: Any, out: Array, head: int,
    first_query: int,
) -> None:  # fmt: skip
    """Up to TILE_ROWS queries of one head; otherwise as `chunk_attention`."""
    num_queries, num_heads, head_dim = q.shape
    num_kv_heads, panels, key_steps, _ = keys.shape
    width = 4 // q.itemsize
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
    panel_size = key_steps * TILE_COLUMNS
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
        place = ((kv_head * values.shape[1] + panel) * value_steps + begin // width) * TILE_COLUMNS
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
        keys, values: as `pack_kv` packs them; as far as the last query's own.
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
