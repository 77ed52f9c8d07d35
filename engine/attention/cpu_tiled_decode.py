"""Decode attention on a CPU with wide vectors: what `cpu_kernels` does, by `engine.cpu_tiles`.

Keys and values are multiplied as they lie in the pool, in the pool's type: 16 positions at a time, wherever their
blocks are, so block size and context decide nothing but addresses. Scores, softmax and sums are float32; the weights
that the softmax gives are rounded to the pool's type, as for a chunk of queries.

Measured on one Zen 4 core in bfloat16, SmolLM2-135M, blocks scattered: 1.4 times as fast as `cpu_kernels` with 32
requests of 192 tokens, 1.7 with 4 of 2,000; only to read the same memory takes 80 % of its time. In float32 both wait
for memory.
"""

from typing import Any

import numba
import numpy as np

from engine.attention.cpu_pool import LayerGeometry, prefetch_rows
from engine.attention.cpu_softmax import weigh
from engine.cpu_code import Array, as_element, kernel, parallel_kernel
from engine.cpu_tiles import LANES, PAIRED_COLUMNS, TILE_COLUMNS, TILE_ROWS, add_weighted_rows, score_rows

_PAIRED_COLUMNS = np.array(PAIRED_COLUMNS)


@kernel
def _attend_heads(
    q: Array, kv: Array, rows: Array, context_len: int, window: int, scale: Any, geometry: LayerGeometry, out: Array,
    first_kv_head: int, num_kv_heads: int,
) -> None:  # fmt: skip
    """One request's query over its context, for a run of KV heads.

    Args:
        q, out: [num_kv_heads of the layer, group_size, head_dim].
        rows: of this request, as `cpu_pool.find_rows` finds them.
    """
    _, group_size, head_dim = q.shape
    num_heads = num_kv_heads * group_size
    values = 4 // kv.itemsize  # that a lane multiplies in a step
    visible = min(context_len, window)
    rows = rows[context_len - visible :]
    num_groups = (visible + LANES - 1) // LANES
    padded = num_groups * LANES
    scores, weights = np.empty((num_heads, padded), np.float32), np.zeros((num_heads, padded), kv.dtype)
    sums, totals = np.zeros((num_heads, head_dim), np.float32), np.empty(num_heads, np.float32)
    key_offset = first_kv_head * geometry.head_stride
    value_offset = key_offset + geometry.side_stride

    for group in range(num_groups):
        group_rows = rows[group * LANES : (group + 1) * LANES]
        # What comes next is fetched meanwhile; behind the last keys come the first values.
        last = group + 1 == num_groups
        following = rows[:LANES] if last else rows[(group + 1) * LANES : (group + 2) * LANES]
        fetched = value_offset if last else key_offset
        for k in range(num_kv_heads):
            offset = k * geometry.head_stride
            for t in range(LANES):
                prefetch_rows(kv, following[t] + fetched + offset, head_dim)
            for h in range(k * group_size, (k + 1) * group_size):
                score_rows(
                    q, (first_kv_head * group_size + h) * head_dim, kv, group_rows, key_offset + offset,
                    head_dim // (LANES * values), scores, h * padded + group * LANES,
                )  # fmt: skip

    for h in range(num_heads):
        totals[h] = weigh(scores[h, :visible], scale, weights[h, :visible])

    for group in range(num_groups):
        group_rows = rows[group * LANES : (group + 1) * LANES]
        following = group_rows if group + 1 == num_groups else rows[(group + 1) * LANES : (group + 2) * LANES]
        for k in range(num_kv_heads):
            offset = value_offset + k * geometry.head_stride
            for t in range(LANES):
                prefetch_rows(kv, following[t] + offset, head_dim)
            for column in range(0, head_dim, TILE_COLUMNS):
                for h in range(k * group_size, (k + 1) * group_size, TILE_ROWS):
                    add_weighted_rows(
                        min(TILE_ROWS, (k + 1) * group_size - h), weights, h * padded + group * LANES, padded,
                        kv, group_rows, offset + column, LANES // values, sums, h * head_dim + column, head_dim,
                    )  # fmt: skip

    for h in range(num_heads):
        inverse = np.float32(1.0) / totals[h]
        result = out[first_kv_head + h // group_size, h % group_size]
        for d in range(head_dim):
            # Of pairs the sums come in another order.
            at = d if values == 1 else d // TILE_COLUMNS * TILE_COLUMNS + _PAIRED_COLUMNS[d % TILE_COLUMNS]
            result[at] = as_element(sums[h, d] * inverse, result[at])


@kernel
def decode_attention(
    q: Array, kv: Array, rows: Array, starts: Array, context_lens: Array, window: int, scale: Any,
    geometry: LayerGeometry, out: Array, order: Array,
) -> None:  # fmt: skip
    """As `cpu_kernels.decode_attention`, but with rows instead of tables.

    Args:
        q, out: [num_requests, num_kv_heads, group_size, head_dim], contiguous, kv's type; head_dim is a multiple of
            TILE_COLUMNS.
        order: [≤ num_requests] int64: the requests to be attended.
        rows, starts: as `cpu_pool.find_rows` takes them.
    """
    for r in order:
        _attend_heads(
            q[r], kv, rows[starts[r] :], int(context_lens[r]), window, scale, geometry, out[r], 0, geometry.num_kv_heads
        )


@parallel_kernel
def decode_attention_parallel(
    q: Array, kv: Array, rows: Array, starts: Array, context_lens: Array, window: int, scale: Any,
    geometry: LayerGeometry, out: Array, order: Array, kv_heads_per_task: int,
) -> None:  # fmt: skip
    """As `decode_attention`, cut into tasks as `cpu_kernels.decode_attention_parallel` is."""
    tasks_per_request = geometry.num_kv_heads // kv_heads_per_task
    for task in numba.prange(len(order) * tasks_per_request):
        r = order[task // tasks_per_request]
        k = (task % tasks_per_request) * kv_heads_per_task
        _attend_heads(
            q[r], kv, rows[starts[r] :], int(context_lens[r]), window, scale, geometry, out[r], k, kv_heads_per_task
        )
