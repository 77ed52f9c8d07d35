"""Attention of single queries: Flash-Decoding over a list of work.

One query has too few rows to fill a GPU, but its context has many keys. So contexts are cut into splits, each attended
on its own, and put together by what their maxima and sums say (Dao et al., "Flash-Decoding for long-context inference",
2023). Where a context is cut depends on its length alone, never on the batch: so does every bit of the result.

The splits of all requests are one list, made by the host, and programs, as many as the GPU holds at once, take from it
in turn. So a CUDA graph, whose number of programs is fixed, pays for the contexts there are, not for the longest that
there could be.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import triton
import triton.language as tl

from engine.attention.triton_kernels.tile import attend_tile


@triton.jit(do_not_specialize=["block_rows", "window"])
def decode(
    out,  # [num_tokens, num_heads, HEAD_DIM], contiguous
    partial_out,  # [num_slots, num_heads, HEAD_DIM] float32: sums of weight · value
    partial_stats,  # [num_slots, num_heads, 2] float32: maximum of scores, sum of weights
    q,  # [num_tokens, num_heads, HEAD_DIM], by strides
    q_token_stride,
    q_head_stride,
    kv,  # one layer of the pool, see attend_tile
    block_rows,
    splits,  # int32: [count, 3 words unused], then (request, first key, end key, slot or -1) each
    query_start,  # [num_requests + 1] int32
    tables,  # int32: [table width, 3 words unused], then the block tables
    window,  # tokens; no split reaches beyond it
    score_scale,
    value_scale,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,  # rows: GROUP, or what products need at least
    BLOCK_N: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Grid: any number of programs. A split without a slot is all of its context: it goes into `out` at once."""
    rows = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    group_heads = tl.minimum(rows, GROUP - 1)  # rows beyond the group repeat its last head
    stored = (rows < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    num_tasks = tl.load(splits) * NUM_KV_HEADS
    for task in tl.range(tl.program_id(0), num_tasks, tl.num_programs(0)):
        split = splits + 4 + task // NUM_KV_HEADS * 4
        kv_head = task % NUM_KV_HEADS
        request = tl.load(split)
        first_key = tl.load(split + 1)
        end_key = tl.load(split + 2)
        slot = tl.load(split + 3)
        table = tables + 4 + request.to(tl.int64) * tl.load(tables)

        heads = kv_head * GROUP + group_heads
        token = tl.load(query_start + request).to(tl.int64)
        q_tile = q + token * q_token_stride + (heads * q_head_stride)[:, None] + dims[None, :]
        q_rows = tl.load(q_tile, mask=(dims < HEAD_DIM)[None, :], other=0.0)
        query_positions = end_key + rows  # behind all keys of the split: only its edges mask

        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
        row_sum = tl.zeros([BLOCK_M], tl.float32)
        for key in tl.range(first_key, end_key, BLOCK_N):
            acc, row_max, row_sum = attend_tile(
                acc, row_max, row_sum, q_rows, query_positions, key, first_key, end_key,
                kv, table, block_rows, kv_head, window, score_scale,
                NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM, BLOCK_D, BLOCK_N, True, False, UPCAST,
            )  # fmt: skip

        if slot < 0:
            attended = acc / row_sum[:, None] * value_scale
            out_rows = (token * (NUM_KV_HEADS * GROUP) + heads) * HEAD_DIM
            tl.store(out + out_rows[:, None] + dims[None, :], attended.to(out.dtype.element_ty), mask=stored)
        else:
            part = slot.to(tl.int64) * (NUM_KV_HEADS * GROUP) + heads
            tl.store(partial_out + (part * HEAD_DIM)[:, None] + dims[None, :], acc, mask=stored)
            tl.store(partial_stats + part * 2, row_max, mask=rows < GROUP)
            tl.store(partial_stats + part * 2 + 1, row_sum, mask=rows < GROUP)


@triton.jit
def combine(
    out,  # [num_tokens, num_heads, HEAD_DIM], contiguous
    partial_out,
    partial_stats,
    merges,  # int32: [4 words unused], then (row of out, first slot, number of splits, unused) each
    value_scale,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MAX_SPLITS: tl.constexpr,  # of any request, a power of two
    BLOCK_S: tl.constexpr,  # splits of a step
):
    """Grid: requests × heads, heads first. Puts the splits of each request together, where there are several."""
    merge = merges + 4 + tl.program_id(0) // NUM_HEADS * 4
    head = tl.program_id(0) % NUM_HEADS
    num_splits = tl.load(merge + 2)
    if num_splits < 2:
        return
    token = tl.load(merge).to(tl.int64)
    first_part = tl.load(merge + 1).to(tl.int64) * NUM_HEADS + head

    every = tl.arange(0, MAX_SPLITS)
    stats = partial_stats + (first_part + every * NUM_HEADS) * 2
    maxima = tl.load(stats, mask=every < num_splits, other=float("-inf"))
    sums = tl.load(stats + 1, mask=every < num_splits, other=0.0)
    top = tl.max(maxima, axis=0)
    total = tl.sum(tl.exp2(maxima - top) * sums, axis=0)

    dims = tl.arange(0, BLOCK_D)
    acc = tl.zeros([BLOCK_D], tl.float32)
    for first in tl.range(0, num_splits, BLOCK_S):
        some = first + tl.arange(0, BLOCK_S)
        parts = first_part + some * NUM_HEADS
        weights = tl.exp2(tl.load(partial_stats + parts * 2, mask=some < num_splits, other=float("-inf")) - top)
        loaded = (some < num_splits)[:, None] & (dims < HEAD_DIM)[None, :]
        values = tl.load(partial_out + (parts * HEAD_DIM)[:, None] + dims[None, :], mask=loaded, other=0.0)
        acc += tl.sum(weights[:, None] * values, axis=0)
    attended = acc / total * value_scale
    out_row = (token * NUM_HEADS + head) * HEAD_DIM
    tl.store(out + out_row + dims, attended.to(out.dtype.element_ty), mask=dims < HEAD_DIM)
