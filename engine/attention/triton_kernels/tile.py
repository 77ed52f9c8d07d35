"""What the prefill and the decode kernel share: one step of attention, over one tile of keys.

The step is FlashAttention-2's (Dao, 2023): scores of a tile of queries by a tile of keys, a running maximum and sum per
query, the accumulator rescaled when the maximum moves, one division at the very end. Keys are found as in
PagedAttention (Kwon et al., 2023): a position's block in the block table, its row in the block. The heads of a group
share their KV head's tile: they are rows of one tile of queries.

All in float32 but the operands of products, which are of the queries' dtype. Exponents are of base 2: the scale of
scores that a kernel is given holds log2(e), and the scale of stored keys.

A tile may hold positions that no query sees (before a window, behind the last token). They are not loaded at all, so
what lies there has no influence, not even a NaN through 0 · NaN.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import triton
import triton.language as tl


@triton.jit
def e4m3_value(code):
    """The values, in float16, of float8_e4m3fn given as bytes: for GPUs that do not know the type.

    Each value is one of float16, whose exponent's bias is 15 instead of 7. So the bits, put where float16 has them, are
    the value / 2^8, zeros and subnormals too. Only NaN has no counterpart: all ones would be 480.
    """
    code = code.to(tl.int16)
    bits = ((code & 0x80) << 8) | ((code & 0x7F) << 7)
    value = bits.to(tl.float16, bitcast=True) * 256.0
    return tl.where((code & 0x7F) == 0x7F, float("nan"), value)


@triton.jit
def attend_tile(
    acc,  # [M, BLOCK_D] float32: sum of weight · value
    row_max,  # [M] float32: of scores so far, -inf at first
    row_sum,  # [M] float32: sum of weights
    q,  # [M, BLOCK_D]
    query_positions,  # [M] int32
    tile_start,  # position of the tile's first key
    first_key,  # keys at positions first_key … end_key - 1 may be loaded
    end_key,
    kv,  # the layer in the pool
    table,  # the request's block ids, int32
    block_rows,  # rows of head_dim elements from one block to the next
    kv_head,
    window,
    score_scale,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,  # False: every query sees every key of the tile
    HAS_WINDOW: tl.constexpr,
    UPCAST: tl.constexpr,  # for the interpreter, which has no products of bfloat16
):
    """acc, row_max and row_sum after one more tile of keys."""
    keys = tile_start + tl.arange(0, BLOCK_N)
    dims = tl.arange(0, BLOCK_D)
    # `None` where nothing needs a mask: an unmasked load stays one wide copy.
    loaded = None
    if MASKED:
        within = (keys >= first_key) & (keys < end_key)
        block_ids = tl.load(table + keys // BLOCK_SIZE, mask=within, other=0)
        loaded = within[:, None] & (dims < HEAD_DIM)[None, :]
    else:
        block_ids = tl.load(table + keys // BLOCK_SIZE)
        if BLOCK_D != HEAD_DIM:
            loaded = (dims < HEAD_DIM)[None, :]
    # A pool has more elements than an int32 counts.
    key_rows = block_ids.to(tl.int64) * block_rows + kv_head * BLOCK_SIZE + keys % BLOCK_SIZE
    value_rows = key_rows + NUM_KV_HEADS * BLOCK_SIZE
    key_tile = kv + key_rows[:, None] * HEAD_DIM + dims[None, :]
    value_tile = kv + value_rows[:, None] * HEAD_DIM + dims[None, :]
    if loaded is None:
        k = tl.load(key_tile)
        v = tl.load(value_tile)
    else:
        k = tl.load(key_tile, mask=loaded, other=0.0)
        v = tl.load(value_tile, mask=loaded, other=0.0)

    if k.dtype == tl.uint8:
        k = e4m3_value(k)
        v = e4m3_value(v)
    dtype: tl.constexpr = tl.float32 if UPCAST else q.dtype
    # "ieee": float32 stays float32, no TF32.
    scores = tl.dot(q.to(dtype), tl.trans(k.to(dtype)), input_precision="ieee") * score_scale
    if MASKED:
        distance = query_positions[:, None] - keys[None, :]
        visible = within[None, :] & (distance >= 0)
        if HAS_WINDOW:
            visible = visible & (distance < window)
        scores = tl.where(visible, scores, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(scores, axis=1))
    # A query may have seen no key yet; -inf less -inf would be NaN.
    anchor = tl.where(new_max == float("-inf"), 0.0, new_max)
    weights = tl.exp2(scores - anchor[:, None])
    shrink = tl.exp2(row_max - anchor)
    row_sum = row_sum * shrink + tl.sum(weights, axis=1)
    weights = weights.to(q.dtype).to(dtype)
    acc = tl.dot(weights, v.to(dtype), acc * shrink[:, None], input_precision="ieee")
    return acc, new_max, row_sum
