"""One layer of the pool as the kernels of a CPU see it: a flat array of elements, where arithmetic alone finds a key.

    block_id · block_stride + side · side_stride + head · head_stride + slot · head_dim        (side: 0 keys, 1 values)

A pool is far larger than the caches and a request's blocks lie anywhere in it, so reading memory is what attention
costs: what comes next is prefetched while something is computed. Into the second level, not the first: a core has many
more outstanding misses there, which alone doubled the throughput measured.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from engine.cpu_code import Array, as_numpy, kernel
from engine.cpu_tiles import LANES


class LayerGeometry(NamedTuple):
    """Where things are in one layer's view of the pool; strides in elements."""

    block_size: int
    num_kv_heads: int
    head_dim: int
    block_stride: int
    side_stride: int  # from a block's keys to its values
    head_stride: int


@dataclass(frozen=True, slots=True, eq=False)
class PoolLayer:
    """One layer's view of the pool."""

    kv: Array  # flat, from its first element to its last; other layers lie in between
    geometry: LayerGeometry
    dtype: torch.dtype

    @classmethod
    def of(cls, view: torch.Tensor) -> "PoolLayer":
        """
        Args:
            view: [num_blocks, 2, num_kv_heads, block_size, head_dim].
        """
        _, _, num_kv_heads, block_size, head_dim = view.shape
        block_stride, side_stride, head_stride, token_stride, element_stride = view.stride()
        assert (token_stride, element_stride) == (head_dim, 1), (
            f"a head's rows must be contiguous, not {token_stride} apart"
        )
        span = 1 + sum((n - 1) * stride for n, stride in zip(view.shape, view.stride(), strict=True))
        return cls(
            as_numpy(view.as_strided((span,), (1,))),
            LayerGeometry(block_size, num_kv_heads, head_dim, block_stride, side_stride, head_stride),
            view.dtype,
        )


@kernel
def find_rows(tables: Array, context_lens: Array, geometry: LayerGeometry, starts: Array, rows: Array) -> None:
    """Where each request's keys begin, for the first KV head of any layer.

    Args:
        tables: [num_requests, max_blocks] int32.
        context_lens: [num_requests] int32.
        starts: [num_requests] int64, of the requests in `rows`.
        rows: int64; each request's positions, and LANES - 1 times the last one again, for a group that is not full.
    """
    for r in range(len(context_lens)):
        at = starts[r]
        end = at + context_lens[r]
        block = 0
        while at < end:
            start = np.int64(tables[r, block]) * geometry.block_stride
            for slot in range(min(geometry.block_size, end - at)):
                rows[at + slot] = start + slot * geometry.head_dim
            at += geometry.block_size
            block += 1
        rows[end : end + LANES - 1] = rows[end - 1]


def _prefetch_code(typing_context: Any, array: Any, index: Any, line: Any) -> Any:
    """Asks for the `line`-th cache line from that of `array[index]` on; a hint, which no address can make fault."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        start = builder.bitcast(builder.gep(data, [args[1]]), ir.IntType(8).as_pointer())
        address = builder.gep(start, [builder.mul(args[2], args[2].type(64))])
        number = ir.IntType(32)
        prototype = ir.FunctionType(ir.VoidType(), [address.type, number, number, number])
        function = builder.module.declare_intrinsic("llvm.prefetch", [address.type], prototype)
        # For reading; into the second level; data.
        builder.call(function, [address, number(0), number(2), number(1)])
        return context.get_dummy_value()

    return types.void(array, types.int64, types.int64), generate


_prefetch: Any = intrinsic(_prefetch_code)


@kernel
def prefetch_rows(kv: Array, start: int, num_elements: int) -> None:
    for line in range(num_elements * kv.itemsize // 64):
        _prefetch(kv, start, line)
