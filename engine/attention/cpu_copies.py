"""Copies between the block pool and contiguous tensors, as machine code.

A layer of the pool is a flat array, addressed as `cpu_pool` tells.
"""

from engine.attention.cpu_pool import LayerGeometry
from engine.cpu_code import Array, kernel


@kernel
def write_kv(kv: Array, k: Array, v: Array, slot_mapping: Array, geometry: LayerGeometry) -> None:
    """Puts the keys and values of tokens into their slots.

    Args:
        kv: the layer, flat.
        k, v: [num_tokens, num_kv_heads, head_dim], any strides, kv's dtype.
        slot_mapping: [num_tokens] int64.
    """
    for i in range(len(slot_mapping)):
        block_id, slot = divmod(slot_mapping[i], geometry.block_size)
        for h in range(geometry.num_kv_heads):
            key = block_id * geometry.block_stride + h * geometry.head_stride + slot * geometry.head_dim
            value = key + geometry.side_stride
            for d in range(geometry.head_dim):
                kv[key + d] = k[i, h, d]
                kv[value + d] = v[i, h, d]


@kernel
def gather_kv(kv: Array, table: Array, first: int, geometry: LayerGeometry, out: Array) -> None:
    """Copies a request's keys and values, from position `first` on, out of their blocks.

    Args:
        kv: the layer, flat.
        table: [max_blocks] int32.
        out: [2, num_kv_heads, num_keys, head_dim], contiguous, kv's dtype.
    """
    num_keys, head_dim = out.shape[2], geometry.head_dim
    done = 0
    while done < num_keys:
        slot = (first + done) % geometry.block_size
        num_rows = min(geometry.block_size - slot, num_keys - done)
        block = int(table[(first + done) // geometry.block_size]) * geometry.block_stride
        for side in range(2):
            for h in range(geometry.num_kv_heads):
                start = block + side * geometry.side_stride + h * geometry.head_stride + slot * head_dim
                rows = out[side, h, done : done + num_rows].reshape(num_rows * head_dim)
                for i in range(num_rows * head_dim):
                    rows[i] = kv[start + i]
        done += num_rows
