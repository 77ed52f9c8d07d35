"""Section `layouts`: a query's scores over K in blocks, as three systems lay a block out.

    head-major    [num_kv_heads, block_size, head_dim]          ours: a head's rows are one run
    token-major   [block_size, num_kv_heads, head_dim]          a token's heads are one run
    x-split       [num_kv_heads, head_dim/x, block_size, x]     vLLM's first kernels': 16 bytes of one token together,
                                                                so that a GPU's threads, one a token, read neighbours

The first two are the same machine code with other strides. Keys of a block are followed by its values, as in a pool,
so that as much memory lies between one block's keys and the next's. None of the kernels prefetches, as the engine's
does: what is compared is how the layouts suit the loads of a core.
"""

import statistics
import time
from collections.abc import Callable

import numpy as np

from benchmarks.paging.report import Column, Table
from engine.cpu_code import Array, kernel

X = 4  # elements of float32 in 16 bytes

COLUMNS = (Column("layout of K"), Column("µs", ",.0f"), Column("GB/s", ".1f"), Column("× head-major", ".2f"))

_ROUNDS = 31


@kernel
def score_rows(
    q: Array, kv: Array, table: Array, context_len: int, block_size: int, block_stride: int, head_stride: int,
    token_stride: int, scores: Array,
) -> None:  # fmt: skip
    """Scores where a token's vector is one run.

    Args:
        q: [num_kv_heads, group_size, head_dim] float32.
        kv: flat, float32; strides are in its elements.
        table: [num_blocks] int32.
        scores: [num_kv_heads, group_size, context_len] float32, written.
    """
    num_kv_heads, group_size, head_dim = q.shape
    for first in range(0, context_len, block_size):
        num_rows = min(block_size, context_len - first)
        for k in range(num_kv_heads):
            start = int(table[first // block_size]) * block_stride + k * head_stride
            t = 0
            while t + 4 <= num_rows:
                row = start + t * token_stride
                row0 = kv[row : row + head_dim]
                row1 = kv[row + token_stride : row + token_stride + head_dim]
                row2 = kv[row + 2 * token_stride : row + 2 * token_stride + head_dim]
                row3 = kv[row + 3 * token_stride : row + 3 * token_stride + head_dim]
                for h in range(group_size):
                    sum0 = sum1 = sum2 = sum3 = np.float32(0.0)
                    query = q[k, h]
                    for d in range(head_dim):
                        sum0 += query[d] * row0[d]
                        sum1 += query[d] * row1[d]
                        sum2 += query[d] * row2[d]
                        sum3 += query[d] * row3[d]
                    scores[k, h, first + t] = sum0
                    scores[k, h, first + t + 1] = sum1
                    scores[k, h, first + t + 2] = sum2
                    scores[k, h, first + t + 3] = sum3
                t += 4
            while t < num_rows:
                row0 = kv[start + t * token_stride : start + t * token_stride + head_dim]
                for h in range(group_size):
                    sum0 = np.float32(0.0)
                    query = q[k, h]
                    for d in range(head_dim):
                        sum0 += query[d] * row0[d]
                    scores[k, h, first + t] = sum0
                t += 1


@kernel
def score_split(
    q: Array, kv: Array, table: Array, context_len: int, block_size: int, block_stride: int, scores: Array
) -> None:
    """Scores of the x-split layout; tokens run side by side, as a GPU's threads do. Arguments as in `score_rows`."""
    num_kv_heads, group_size, head_dim = q.shape
    for first in range(0, context_len, block_size):
        num_rows = min(block_size, context_len - first)
        for k in range(num_kv_heads):
            start = int(table[first // block_size]) * block_stride + k * block_size * head_dim
            for h in range(group_size):
                sums = scores[k, h, first : first + num_rows]
                for t in range(num_rows):
                    sums[t] = np.float32(0.0)
                for c in range(head_dim // 4):
                    q0, q1, q2, q3 = q[k, h, 4 * c], q[k, h, 4 * c + 1], q[k, h, 4 * c + 2], q[k, h, 4 * c + 3]
                    run = kv[start + 4 * c * block_size : start + 4 * c * block_size + 4 * num_rows]
                    for t in range(num_rows):
                        sums[t] += (q0 * run[4 * t] + q1 * run[4 * t + 1]) + (q2 * run[4 * t + 2] + q3 * run[4 * t + 3])


def laid_out(keys: Array, layout: str) -> Array:
    """Blocks of keys and as many zeros for values, flat.

    Args:
        keys: [num_blocks, num_kv_heads, block_size, head_dim].
    """
    num_blocks, num_kv_heads, block_size, head_dim = keys.shape
    if layout == "token-major":
        keys = keys.transpose(0, 2, 1, 3)
    elif layout == "x-split":
        keys = keys.reshape(num_blocks, num_kv_heads, block_size, head_dim // X, X).transpose(0, 1, 3, 2, 4)
    flat = keys.reshape(num_blocks, -1)
    return np.concatenate([flat, np.zeros_like(flat)], axis=1).reshape(-1)


def scorers(block_size: int, num_kv_heads: int, head_dim: int) -> dict[str, Callable[..., None]]:
    """By layout: f(q, kv, table, context_len, scores)."""
    block = 2 * num_kv_heads * block_size * head_dim

    def head_major(q: Array, kv: Array, table: Array, context_len: int, scores: Array) -> None:
        score_rows(q, kv, table, context_len, block_size, block, block_size * head_dim, head_dim, scores)

    def token_major(q: Array, kv: Array, table: Array, context_len: int, scores: Array) -> None:
        score_rows(q, kv, table, context_len, block_size, block, head_dim, num_kv_heads * head_dim, scores)

    def x_split(q: Array, kv: Array, table: Array, context_len: int, scores: Array) -> None:
        score_split(q, kv, table, context_len, block_size, block, scores)

    return {"head-major": head_major, "token-major": token_major, "x-split": x_split}


def layouts_table(
    *, block_size: int, context_len: int, num_requests: int, num_kv_heads: int, group_size: int, head_dim: int
) -> Table:
    """Scores of one query of each request over its context, blocks scattered; medians."""
    blocks_per_request = -(-context_len // block_size)
    num_blocks = num_requests * blocks_per_request
    generator = np.random.default_rng(0)
    keys = generator.standard_normal((num_blocks, num_kv_heads, block_size, head_dim), np.float32)
    q = generator.standard_normal((num_kv_heads, group_size, head_dim), np.float32)
    tables = generator.permutation(num_blocks).astype(np.int32).reshape(num_requests, blocks_per_request)
    scores = np.empty((num_kv_heads, group_size, context_len), np.float32)
    functions = scorers(block_size, num_kv_heads, head_dim)
    memory = {layout: laid_out(keys, layout) for layout in functions}
    seconds: dict[str, list[float]] = {layout: [] for layout in functions}
    for round_ in range(_ROUNDS + 1):
        for layout, score in functions.items():
            began = time.perf_counter()
            for table in tables:
                score(q, memory[layout], table, context_len, scores)
            if round_ > 0:  # the first compiles
                seconds[layout].append(time.perf_counter() - began)
    median = {layout: statistics.median(values) for layout, values in seconds.items()}
    num_bytes = num_requests * context_len * num_kv_heads * head_dim * 4
    table_ = Table(
        f"K layouts, blocks of {block_size}",
        f"Layouts of K: scores of {num_requests} requests, context {context_len:,}, blocks of {block_size}, float32, "
        f"one thread",
        COLUMNS,
    )
    for layout, value in median.items():
        table_.add(layout, 1e6 * value, num_bytes / value / 1e9, value / median["head-major"])
    return table_
