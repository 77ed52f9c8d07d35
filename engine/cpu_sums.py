"""Sums of a row of numbers, each in one order: the same numbers give the same bits, whatever code they are summed in.

A loop that adds up floats becomes vectors only where the compiler may reorder it, and how it does so depends on what it
is compiled together with: for one thread or several, anew or out of what lies on disk. Here the order is written down:
number i goes to lane i % 64, the lanes are added in halves, and what is left of the row comes last, one by one.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

_code: Any = cgutils
_LANES = 16  # of a vector of float32
_VECTORS = 4  # sums side by side: an addition takes as many cycles as its successor would have to wait
_STRIDE = _LANES * _VECTORS
_INDEX, _WORD, _FLOAT = ir.IntType(64), ir.IntType(32), ir.FloatType()


class _Row:
    """Numbers of a contiguous array, as float32: it holds these, or bfloat16 as uint16."""

    def __init__(self, context: Any, builder: Any, array_type: Any, array: Any, start: Any) -> None:
        data = context.make_array(array_type)(context, builder, array).data
        self._builder = builder
        self._first = builder.gep(data, [start])
        self._is_bfloat = array_type.dtype == types.uint16

    def load(self, index: Any, lanes: int) -> Any:
        """One number, or a vector of them."""

        def of(element: Any) -> Any:
            return element if lanes == 1 else ir.VectorType(element, lanes)

        builder = self._builder
        address = builder.gep(self._first, [index])
        if not self._is_bfloat:
            return builder.load(builder.bitcast(address, of(_FLOAT).as_pointer()), align=4)
        bits = builder.load(builder.bitcast(address, of(ir.IntType(16)).as_pointer()), align=2)
        shift = ir.Constant(of(_WORD), 16 if lanes == 1 else [16] * lanes)
        return builder.bitcast(builder.shl(builder.zext(bits, of(_WORD)), shift), of(_FLOAT))


def _sum(builder: Any, row: _Row, count: Any, add: Callable[[Any, Any], Any]) -> Any:
    """
    Args:
        add: takes a sum and a number, scalars or vectors, and gives the next sum.
    """
    vector = ir.VectorType(_FLOAT, _LANES)
    sums = [_code.alloca_once_value(builder, ir.Constant(vector, None)) for _ in range(_VECTORS)]
    num_whole = builder.sdiv(count, _INDEX(_STRIDE))
    with _code.for_range(builder, num_whole, intp=_INDEX) as loop:
        place = builder.mul(loop.index, _INDEX(_STRIDE))
        for number, sum_ in enumerate(sums):
            numbers = row.load(builder.add(place, _INDEX(number * _LANES)), _LANES)
            builder.store(add(builder.load(sum_), numbers), sum_)
    total = _sum_of_lanes(builder, [builder.load(sum_) for sum_ in sums])
    rest = _code.alloca_once_value(builder, total)
    first = builder.mul(num_whole, _INDEX(_STRIDE))
    with _code.for_range(builder, builder.sub(count, first), intp=_INDEX) as loop:
        number = row.load(builder.add(first, loop.index), 1)
        builder.store(add(builder.load(rest), number), rest)
    return builder.load(rest)


def _sum_of_lanes(builder: Any, vectors: list[Any]) -> Any:
    while len(vectors) > 1:
        half = len(vectors) // 2
        vectors = [builder.fadd(a, b) for a, b in zip(vectors[:half], vectors[half:], strict=True)]
    [vector] = vectors
    lanes = _LANES
    while lanes > 1:
        lanes //= 2
        halves = [
            builder.shuffle_vector(
                vector, vector, ir.Constant(ir.VectorType(_WORD, lanes), [first + i for i in range(lanes)])
            )
            for first in (0, lanes)
        ]
        vector = builder.fadd(*halves)
    return builder.extract_element(vector, _WORD(0))


def _sum_code(typing_context: Any, array: Any, start: Any, count: Any) -> Any:
    """Σ array[start + i], for i below `count`; contiguous, float32, or uint16 meaning bfloat16."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array, start, count = args
        return _sum(builder, _Row(context, builder, signature.args[0], array, start), count, builder.fadd)

    return types.float32(array, types.int64, types.int64), generate


def _sum_of_squares_code(typing_context: Any, array: Any, start: Any, count: Any) -> Any:
    """Σ array[start + i]², likewise; `start` counts over all dimensions."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array, start, count = args

        def add_square(sum_: Any, number: Any) -> Any:
            name = "llvm.fma.f32" if number.type == _FLOAT else f"llvm.fma.v{_LANES}f32"
            fma = _code.get_or_insert_function(builder.module, ir.FunctionType(number.type, [number.type] * 3), name)
            return builder.call(fma, [number, number, sum_])

        return _sum(builder, _Row(context, builder, signature.args[0], array, start), count, add_square)

    return types.float32(array, types.int64, types.int64), generate


row_sum: Any = intrinsic(_sum_code)
sum_of_squares: Any = intrinsic(_sum_of_squares_code)
