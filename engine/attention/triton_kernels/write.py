"""Keys and values of a step, from the projections into their slots; into an 8-bit pool rounded on the way."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import triton
import triton.language as tl

_E4M3_MAX = tl.constexpr(448.0)


@triton.jit
def e4m3_code(x):
    """The bits of float32 values in float8_e4m3fn (1 sign, 4 exponent, 3 mantissa bits; no infinities), as int32.

    Rounded to nearest, ties to even; beyond ±448 the largest; NaN stays NaN. By arithmetic of integers, because the
    conversion of hardware is missing before compute capability 8.9, and so that the same code runs everywhere.
    """
    bits = x.to(tl.int32, bitcast=True)
    magnitude = tl.minimum((bits & 0x7FFFFFFF).to(tl.float32, bitcast=True), _E4M3_MAX)
    magnitude_bits = magnitude.to(tl.int32, bitcast=True)
    # Half of the 20 mantissa bits that go, less one if what stays is even; then the exponent's bias 127 becomes 7.
    normal = ((magnitude_bits + 0x7FFFF + ((magnitude_bits >> 20) & 1)) >> 20) - ((127 - 7) << 3)
    # Below 2^-6 steps are 2^-9, which is the distance of floats at 2^14: adding rounds, the low bits then count steps.
    subnormal = (magnitude + 16384.0).to(tl.int32, bitcast=True) & 0xFF
    code = tl.where(magnitude < 0.015625, subnormal, normal)
    code = tl.where(x != x, 0x7F, code)
    return code | ((bits >> 24) & 0x80)


@triton.jit(do_not_specialize=["block_rows"])
def write_kv(
    kv,  # one layer of the pool, rows as in attend_tile; bytes are of float8_e4m3fn, others have no scale
    block_rows,
    k,  # [num_tokens, NUM_KV_HEADS, HEAD_DIM], by strides
    k_token_stride,
    k_head_stride,
    v,
    v_token_stride,
    v_head_stride,
    slots,  # [num_tokens] int32
    key_scale,
    value_scale,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_H: tl.constexpr,  # NUM_KV_HEADS, or the next power of two
    BLOCK_D: tl.constexpr,
):
    """Grid: tokens."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    heads = tl.arange(0, BLOCK_H)
    dims = tl.arange(0, BLOCK_D)
    exists = (heads < NUM_KV_HEADS)[:, None] & (dims < HEAD_DIM)[None, :]
    keys = tl.load(k + token * k_token_stride + heads[:, None] * k_head_stride + dims[None, :], mask=exists)
    values = tl.load(v + token * v_token_stride + heads[:, None] * v_head_stride + dims[None, :], mask=exists)

    key_rows = (slot // BLOCK_SIZE).to(tl.int64) * block_rows + heads * BLOCK_SIZE + slot % BLOCK_SIZE
    value_rows = key_rows + NUM_KV_HEADS * BLOCK_SIZE
    if kv.dtype.element_ty == tl.uint8:
        keys = e4m3_code(tl.div_rn(keys.to(tl.float32), key_scale))
        values = e4m3_code(tl.div_rn(values.to(tl.float32), value_scale))
    tl.store(kv + key_rows[:, None] * HEAD_DIM + dims[None, :], keys.to(kv.dtype.element_ty), mask=exists)
    tl.store(kv + value_rows[:, None] * HEAD_DIM + dims[None, :], values.to(kv.dtype.element_ty), mask=exists)
