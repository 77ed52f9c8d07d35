"""Attention of chunks: a program has a tile of one request's queries, for the heads of one KV head.

Rows of the tile are queries × the heads of the group: with few heads there are many queries in a tile, with many heads
few, and products are always of the same size. Which tiles there are is a list that the host has made: no program starts
to find that it has nothing to do, and those with the longest way to go start first.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import triton
import triton.language as tl

from engine.attention.triton_kernels.tile import attend_tile


@triton.jit(do_not_specialize=["block_rows", "window"])
def prefill(
    out,  # [num_tokens, num_heads, HEAD_DIM], contiguous
    q,  # [num_tokens, num_heads, HEAD_DIM], by strides
    q_token_stride,
    q_head_stride,
    kv,  # one layer of the pool, see attend_tile
    block_rows,
    tiles,  # int32: [4 words unused], then (request, first row of q, number of queries, first position) each
    tables,  # int32: [table width, 3 words unused], then the block tables
    window,  # tokens; read if HAS_WINDOW
    score_scale,
    value_scale,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads of a KV head
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,  # HEAD_DIM, or the next power of two
    BLOCK_M: tl.constexpr,  # rows: BLOCK_M // GROUP queries are in a tile
    BLOCK_N: tl.constexpr,  # keys of a step
    HAS_WINDOW: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Grid: tiles × KV heads, heads first. Rows of single queries are left alone."""
    tile = tiles + 4 + tl.program_id(0) // NUM_KV_HEADS * 4
    kv_head = tl.program_id(0) % NUM_KV_HEADS
    request = tl.load(tile)
    first_row = tl.load(tile + 1)
    num_queries = tl.load(tile + 2)
    position = tl.load(tile + 3)
    table = tables + 4 + request.to(tl.int64) * tl.load(tables)

    rows = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    # Rows beyond the last query repeat it: what they load exists, and what they compute is not stored.
    queries = tl.minimum(rows // GROUP, num_queries - 1)
    heads = kv_head * GROUP + rows % GROUP
    tokens = (first_row + queries).to(tl.int64)
    q_tile = q + (tokens * q_token_stride + heads * q_head_stride)[:, None] + dims[None, :]
    q_rows = tl.load(q_tile, mask=(dims < HEAD_DIM)[None, :], other=0.0)
    query_positions = position + queries

    # The keys that any query of the tile sees, in steps of BLOCK_N; masks are needed only at the two edges.
    end_key = position + num_queries
    first_key = 0
    start = 0
    full_start = 0
    if HAS_WINDOW:
        first_key = tl.maximum(position - window + 1, 0)
        start = first_key // BLOCK_N * BLOCK_N
        # From here on all keys are in the window of the last query, and so of all.
        full_start = tl.cdiv(tl.maximum(end_key - window, 0), BLOCK_N) * BLOCK_N
        full_start = tl.minimum(full_start, tl.cdiv(end_key, BLOCK_N) * BLOCK_N)
    # Up to here all keys are seen by the first query, and so by all.
    full_end = tl.maximum((position + 1) // BLOCK_N * BLOCK_N, full_start)

    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    if HAS_WINDOW:
        for key in tl.range(start, full_start, BLOCK_N):
            acc, row_max, row_sum = attend_tile(
                acc, row_max, row_sum, q_rows, query_positions, key, first_key, end_key,
                kv, table, block_rows, kv_head, window, score_scale,
                NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM, BLOCK_D, BLOCK_N, True, HAS_WINDOW, UPCAST,
            )  # fmt: skip
    for key in tl.range(full_start, full_end, BLOCK_N):
        acc, row_max, row_sum = attend_tile(
            acc, row_max, row_sum, q_rows, query_positions, key, first_key, end_key,
            kv, table, block_rows, kv_head, window, score_scale,
            NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM, BLOCK_D, BLOCK_N, False, HAS_WINDOW, UPCAST,
        )  # fmt: skip
    for key in tl.range(full_end, end_key, BLOCK_N):
        acc, row_max, row_sum = attend_tile(
            acc, row_max, row_sum, q_rows, query_positions, key, first_key, end_key,
            kv, table, block_rows, kv_head, window, score_scale,
            NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM, BLOCK_D, BLOCK_N, True, HAS_WINDOW, UPCAST,
        )  # fmt: skip

    attended = acc / row_sum[:, None] * value_scale
    out_tile = out + ((tokens * (NUM_KV_HEADS * GROUP) + heads) * HEAD_DIM)[:, None] + dims[None, :]
    stored = (rows < num_queries * GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    tl.store(out_tile, attended.to(out.dtype.element_ty), mask=stored)
