"""Decode attention on any CPU: numba kernels that walk block tables. All sums are float32.

It runs in three passes over one request's context: scores (every key row is read once for all query heads that share
it), softmax, weighted sum of the value rows. While one block is computed, the next one named by the table is
prefetched.
"""

from typing import Any

import numba
import numpy as np

from engine.attention.cpu_pool import LayerGeometry, prefetch_rows
from engine.attention.cpu_softmax import weigh
from engine.cpu_code import Array, as_float, loose_kernel, parallel_kernel


@loose_kernel
def _score_rows(
    q: Array, kv: Array, start: int, following: int, num_rows: int, first_head: int, scores: Array, column: int
) -> None:
    """scores[h, column + t] = q[h] · row t, for the query heads of one KV head and rows of one block.

    Args:
        q: [heads of one KV head, head_dim] float32.
        start, following: of the first row, and of the one to be fetched meanwhile.
        scores: [all query heads of the task, context] float32; those of this KV head begin at `first_head`.
    """
    group_size, head_dim = q.shape
    t = 0
    # Four rows at once: one load of q serves four products, and four sums run side by side.
    while t + 4 <= num_rows:
        prefetch_rows(kv, following + t * head_dim, 4 * head_dim)
        row = start + t * head_dim
        row0 = kv[row : row + head_dim]
        row1 = kv[row + head_dim : row + 2 * head_dim]
        row2 = kv[row + 2 * head_dim : row + 3 * head_dim]
        row3 = kv[row + 3 * head_dim : row + 4 * head_dim]
        for h in range(group_size):
            sum0 = sum1 = sum2 = sum3 = np.float32(0.0)
            query = q[h]
            for d in range(head_dim):
                x = query[d]
                sum0 += x * as_float(row0[d])
                sum1 += x * as_float(row1[d])
                sum2 += x * as_float(row2[d])
                sum3 += x * as_float(row3[d])
            scores[first_head + h, column + t] = sum0
            scores[first_head + h, column + t + 1] = sum1
            scores[first_head + h, column + t + 2] = sum2
            scores[first_head + h, column + t + 3] = sum3
        t += 4
    while t < num_rows:
        prefetch_rows(kv, following + t * head_dim, head_dim)
        row0 = kv[start + t * head_dim : start + (t + 1) * head_dim]
        for h in range(group_size):
            sum0 = np.float32(0.0)
            query = q[h]
            for d in range(head_dim):
                sum0 += query[d] * as_float(row0[d])
            scores[first_head + h, column + t] = sum0
        t += 1


@loose_kernel
def _add_weighted_rows(
    weights: Array, column: int, kv: Array, start: int, following: int, num_rows: int, first_head: int, acc: Array
) -> None:
    """acc[h] += Σ weights[first_head + h, column + t] · row t; the counterpart of `_score_rows` for values.

    Args:
        acc: [heads of one KV head, head_dim] float32.
    """
    group_size, head_dim = acc.shape
    t = 0
    while t + 4 <= num_rows:
        prefetch_rows(kv, following + t * head_dim, 4 * head_dim)
        row = start + t * head_dim
        row0 = kv[row : row + head_dim]
        row1 = kv[row + head_dim : row + 2 * head_dim]
        row2 = kv[row + 2 * head_dim : row + 3 * head_dim]
        row3 = kv[row + 3 * head_dim : row + 4 * head_dim]
        for h in range(group_size):
            w0 = weights[first_head + h, column + t]
            w1 = weights[first_head + h, column + t + 1]
            w2 = weights[first_head + h, column + t + 2]
            w3 = weights[first_head + h, column + t + 3]
            sums = acc[h]
            for d in range(head_dim):
                # One chain of multiply-adds; neighbouring d run side by side.
                partial = sums[d] + w0 * as_float(row0[d])
                partial += w1 * as_float(row1[d])
                partial += w2 * as_float(row2[d])
                sums[d] = partial + w3 * as_float(row3[d])
        t += 4
    while t < num_rows:
        prefetch_rows(kv, following + t * head_dim, head_dim)
        row0 = kv[start + t * head_dim : start + (t + 1) * head_dim]
        for h in range(group_size):
            w0 = weights[first_head + h, column + t]
            sums = acc[h]
            for d in range(head_dim):
                sums[d] += w0 * as_float(row0[d])
        t += 1


@loose_kernel
def _attend_heads(
    q: Array, kv: Array, tables: Array, context_lens: Array, window: int, scale: Any, geometry: LayerGeometry,
    out: Array, r: int, first_kv_head: int, num_kv_heads: int,
) -> None:  # fmt: skip
    """One request's query over its context, for a run of KV heads; otherwise as `decode_attention`.

    Both callers pass the same types, so that this is the same machine code for both, and rounds alike.
    """
    group_size, head_dim = q.shape[2], q.shape[3]
    block_size = geometry.block_size
    table, context_len = tables[r], int(context_lens[r])
    first = max(0, context_len - window)
    scaled = np.empty((num_kv_heads, group_size, head_dim), np.float32)
    for k in range(num_kv_heads):
        for h in range(group_size):
            for d in range(head_dim):
                scaled[k, h, d] = q[r, first_kv_head + k, h, d] * scale
                out[r, first_kv_head + k, h, d] = np.float32(0.0)
    scores = np.empty((num_kv_heads * group_size, context_len - first), np.float32)

    keys = first_kv_head * geometry.head_stride
    values = keys + geometry.side_stride
    position = first
    while position < context_len:
        slot = position % block_size
        num_rows = min(block_size - slot, context_len - position)
        start = int(table[position // block_size]) * geometry.block_stride + keys + slot * head_dim
        if position + num_rows < context_len:
            following = int(table[position // block_size + 1]) * geometry.block_stride + keys
        else:
            following = int(table[first // block_size]) * geometry.block_stride + values
        for k in range(num_kv_heads):
            offset = k * geometry.head_stride
            _score_rows(
                scaled[k], kv, start + offset, following + offset, num_rows, k * group_size, scores, position - first
            )
        position += num_rows

    for h in range(len(scores)):
        inverse = np.float32(1.0) / weigh(scores[h], np.float32(1.0), scores[h])
        for i in range(scores.shape[1]):
            scores[h, i] *= inverse

    position = first
    while position < context_len:
        slot = position % block_size
        num_rows = min(block_size - slot, context_len - position)
        start = int(table[position // block_size]) * geometry.block_stride + values + slot * head_dim
        following = start
        if position + num_rows < context_len:
            following = int(table[position // block_size + 1]) * geometry.block_stride + values
        for k in range(num_kv_heads):
            offset = k * geometry.head_stride
            _add_weighted_rows(
                scores, position - first, kv, start + offset, following + offset, num_rows, k * group_size,
                out[r, first_kv_head + k],
            )  # fmt: skip
        position += num_rows


@loose_kernel
def decode_attention(
    q: Array, kv: Array, tables: Array, context_lens: Array, window: int, scale: Any, geometry: LayerGeometry,
    out: Array, order: Array,
) -> None:  # fmt: skip
    """Attention of one query a request, its last position, one request after the other.

    Args:
        q, out: [num_requests, num_kv_heads, group_size, head_dim] float32, contiguous.
        kv: the layer, flat; float32, or uint16 meaning bfloat16.
        tables: [num_requests, max_blocks] int32; only entries that hold visible keys are read.
        context_lens: [num_requests] int32, each at least 1.
        window: keys that a query sees at most.
        scale: float32.
        order: [≤ num_requests] int64: the requests to be attended.
    """
    num_kv_heads = geometry.num_kv_heads
    for r in order:
        _attend_heads(q, kv, tables, context_lens, window, scale, geometry, out, r, 0, num_kv_heads)


@parallel_kernel
def decode_attention_parallel(
    q: Array, kv: Array, tables: Array, context_lens: Array, window: int, scale: Any, geometry: LayerGeometry,
    out: Array, order: Array, kv_heads_per_task: int,
) -> None:  # fmt: skip
    """As `decode_attention`, cut into tasks for threads; compiled for itself, it may round the last bits otherwise.

    Args:
        order: threads take runs of it.
        kv_heads_per_task: divides num_kv_heads. All of them read a block in one run; fewer make more tasks.
    """
    tasks_per_request = geometry.num_kv_heads // kv_heads_per_task
    for task in numba.prange(len(order) * tasks_per_request):
        r = order[task // tasks_per_request]
        k = (task % tasks_per_request) * kv_heads_per_task
        _attend_heads(q, kv, tables, context_lens, window, scale, geometry, out, r, k, kv_heads_per_task)
