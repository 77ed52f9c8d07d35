"""Small matrix products as machine code, by the widest vectors of a CPU.

A tile is what a core keeps in its registers: up to 8 rows by 32 columns of sums, two vectors a row. Every element is
one sum in one order, whatever tile it lies in and however many rows there are: the same numbers give the same bits in
any batch and any chunk.

bfloat16 goes in pairs, as `vdpbf16ps` takes them: a pair of a row times a pair of a column, added to a float32. (The
scheme is that of Goto and van de Geijn, "Anatomy of High-Performance Matrix Multiplication", 2008, with a left operand
that is used as it lies.)

Measured on one Zen 4 core over all matrices of SmolLM2-135M in bfloat16, beside oneDNN with packed weights: 1.8 times
as fast with one row, where all of the core's memory bandwidth is used, 1.6 with 8, 1.2 with 32, as fast with 512.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numba
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from engine.cpu_features import has_feature

TILE_ROWS = 8
TILE_COLUMNS = 32

LANES = 16  # of a vector of float32
# Where the columns of `add_weighted_rows` are, in bfloat16: the instruction that pairs two rows works in quarters.
PAIRED_COLUMNS = [8 * lane + half + i for half in (0, 4) for lane in range(4) for i in range(4)]

_code: Any = cgutils
_WORD, _INDEX, _FLOAT = ir.IntType(32), ir.IntType(64), ir.FloatType()
_FLOATS = ir.VectorType(_FLOAT, LANES)
_WORDS = ir.VectorType(_WORD, LANES)


class _BFloat(ir.Type):  # type: ignore[misc]
    """LLVM's own bfloat16, which llvmlite does not name."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


_BFLOATS = ir.VectorType(_BFloat(), LANES)
_BFLOAT_PAIRS = ir.VectorType(_BFloat(), 2 * LANES)


def has_tiles(dtype: torch.dtype) -> bool:
    """Whether this CPU multiplies tiles of a type faster than oneDNN does.

    Not so with AMX, whose own tiles are larger, and which oneDNN uses; nor if numba is told to compile for another CPU.
    """
    if numba.config.CPU_NAME or numba.config.CPU_FEATURES or not numba.config.ENABLE_AVX:  # type: ignore[attr-defined]
        return False
    if dtype == torch.float32:
        return has_feature("avx512f")
    return dtype == torch.bfloat16 and has_feature("avx512bf16") and not has_feature("amx-bf16")


class _Writer(NamedTuple):
    """What all pieces of code are written with; `pairs`: operands are pairs of bfloat16, else float32."""

    context: Any
    builder: Any
    pairs: bool

    def address(self, array_type: Any, array: Any, index: Any) -> Any:
        """Of an element of a contiguous array, counted over all its dimensions."""
        data = self.context.make_array(array_type)(self.context, self.builder, array).data
        return self.builder.gep(data, [index])

    def add(self, a: Any, number: int) -> Any:
        return self.builder.add(a, _INDEX(number))

    def load(self, address: Any, vector: Any) -> Any:
        return self.builder.load(self.builder.bitcast(address, vector.as_pointer()), align=2)

    def store(self, value: Any, address: Any) -> None:
        self.builder.store(value, self.builder.bitcast(address, value.type.as_pointer()), align=2)

    def operand(self, words: Any) -> Any:
        return self.builder.bitcast(words, _BFLOAT_PAIRS if self.pairs else _FLOATS)

    def broadcast(self, word: Any) -> Any:
        undefined = ir.Constant(_WORDS, ir.Undefined)
        first = self.builder.insert_element(undefined, word, _WORD(0))
        return self.operand(self.builder.shuffle_vector(first, undefined, ir.Constant(_WORDS, [0] * LANES)))

    def multiply_add(self, a: Any, b: Any, sums: Any) -> Any:
        """sums + a · b by one instruction; of pairs both products."""
        module = self.builder.module
        if self.pairs:
            prototype = ir.FunctionType(_FLOATS, [_FLOATS, _BFLOAT_PAIRS, _BFLOAT_PAIRS])
            dot = _code.get_or_insert_function(module, prototype, "llvm.x86.avx512bf16.dpbf16ps.512")
            return self.builder.call(dot, [sums, a, b])
        fma = _code.get_or_insert_function(module, ir.FunctionType(_FLOATS, [_FLOATS] * 3), "llvm.fma.v16f32")
        return self.builder.call(fma, [a, b, sums])

    def shuffle(self, a: Any, b: Any, order: list[int]) -> Any:
        return self.builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(_WORD, len(order)), order))


def _tiles(
    writer: _Writer, num_rows: Any, a: Any, a_stride: Any, num_steps: Any, columns: Callable[[Any], list[Any]],
    initial: Callable[[int, int], Any], finish: Callable[[int, int, Any], None],
) -> None:  # fmt: skip
    """Sums for `num_rows` rows, 1 to TILE_ROWS, of a tile.

    Args:
        a, a_stride: address of the left operand, and from row to row in its elements.
        columns: of a step, the two vectors of the right operand.
        initial: of a row and a vector (0 or 1), what the sum begins with.
        finish: takes a row, a vector and its sum.
    """
    builder = writer.builder

    def tile(rows: int) -> None:
        lines = [
            builder.bitcast(builder.gep(a, [builder.mul(a_stride, _INDEX(r))]), _WORD.as_pointer()) for r in range(rows)
        ]
        sums = [[_code.alloca_once_value(builder, initial(r, c)) for c in range(2)] for r in range(rows)]
        with _code.for_range(builder, num_steps, intp=_INDEX) as loop:
            vectors = columns(loop.index)
            for line, row_sums in zip(lines, sums, strict=True):
                row = writer.broadcast(builder.load(builder.gep(line, [loop.index]), align=2))
                for column, place in zip(vectors, row_sums, strict=True):
                    builder.store(writer.multiply_add(row, column, builder.load(place)), place)
        for r in range(rows):
            for c in range(2):
                finish(r, c, builder.load(sums[r][c]))

    done = builder.append_basic_block("tile.done")
    choice = builder.switch(num_rows, done)
    for rows in range(1, TILE_ROWS + 1):
        block = builder.append_basic_block(f"tile.{rows}")
        choice.add_case(_INDEX(rows), block)
        builder.position_at_end(block)
        tile(rows)
        builder.branch(done)
    builder.position_at_end(done)


def _multiply_tile_code(
    typing_context: Any, num_rows: Any, a: Any, a_start: Any, a_stride: Any, b: Any, b_start: Any, num_steps: Any,
    initial: Any, initial_start: Any, out: Any, out_start: Any, out_stride: Any,
) -> Any:  # fmt: skip
    """out[r, c] = initial[c] + Σ a[r, k] · b[k, c], with b packed: read from one end to the other.

    Args:
        num_rows: 1 to TILE_ROWS.
        a: float32, or bfloat16 as uint16; row r begins at `a_start + r * a_stride`, elements.
        b: of the same type, [num_steps, TILE_COLUMNS, values of a step], from `b_start` on.
        num_steps: of one value each in float32, of a pair in bfloat16.
        initial: float32; TILE_COLUMNS values from `initial_start` on.
        out: float32, or of a's type; row r from `out_start + r * out_stride` on.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        num_rows, a, a_start, a_stride, b, b_start, num_steps, initial, initial_start, out, out_start, out_stride = args
        a_type, b_type, initial_type, out_type = (signature.args[i] for i in (1, 4, 7, 9))
        writer = _Writer(context, builder, pairs=a_type.dtype == types.uint16)
        packed = builder.bitcast(writer.address(b_type, b, b_start), _WORDS.as_pointer())
        begin = writer.address(initial_type, initial, initial_start)
        result = writer.address(out_type, out, out_start)

        def columns(step: Any) -> list[Any]:
            first = builder.mul(step, _INDEX(2))
            places = [builder.gep(packed, [writer.add(first, c)]) for c in range(2)]
            return [writer.operand(writer.load(place, _WORDS)) for place in places]

        def first_sum(r: int, c: int) -> Any:
            return writer.load(builder.gep(begin, [_INDEX(c * LANES)]), _FLOATS)

        def finish(r: int, c: int, total: Any) -> None:
            if out_type.dtype == types.uint16:
                total = builder.fptrunc(total, _BFLOATS)
            place = writer.add(builder.mul(out_stride, _INDEX(r)), c * LANES)
            writer.store(total, builder.gep(result, [place]))

        left = writer.address(a_type, a, a_start)
        _tiles(writer, num_rows, left, a_stride, num_steps, columns, first_sum, finish)
        return context.get_dummy_value()

    index = types.int64
    return types.void(index, a, index, index, b, index, index, initial, index, out, index, index), generate


def _add_weighted_rows_code(
    typing_context: Any, num_sums: Any, weights: Any, weights_start: Any, weights_stride: Any, kv: Any, rows: Any,
    offset: Any, num_steps: Any, sums: Any, sums_start: Any, sums_stride: Any,
) -> Any:  # fmt: skip
    """sums[s, c] += Σ weights[s, t] · kv[rows[t] + offset + c], for TILE_COLUMNS columns.

    In bfloat16 two rows make the pairs of a step, and the columns of `sums` come in the order of `PAIRED_COLUMNS`.

    Args:
        num_sums: 1 to TILE_ROWS.
        weights: kv's type; those of sum s from `weights_start + s * weights_stride` on, elements.
        kv: flat; float32, or bfloat16 as uint16.
        rows: int64, where rows begin; `num_steps` of them, or pairs of them.
        sums: float32; those of s from `sums_start + s * sums_stride` on.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        num_sums, weights, weights_start, weights_stride, kv, rows, offset, num_steps, sums, sums_start, stride = args
        weights_type, kv_type, rows_type, sums_type = (signature.args[i] for i in (1, 4, 5, 8))
        writer = _Writer(context, builder, pairs=kv_type.dtype == types.uint16)
        values, starts = writer.address(kv_type, kv, offset), writer.address(rows_type, rows, _INDEX(0))
        result = writer.address(sums_type, sums, sums_start)

        def row(number: Any) -> Any:
            return builder.gep(values, [builder.load(builder.gep(starts, [number]))])

        def columns(step: Any) -> list[Any]:
            if not writer.pairs:
                address = row(step)
                return [writer.load(builder.gep(address, [_INDEX(c * LANES)]), _FLOATS) for c in range(2)]
            number = builder.mul(step, _INDEX(2))
            bfloats = ir.VectorType(ir.IntType(16), TILE_COLUMNS)
            first, second = (writer.load(row(writer.add(number, t)), bfloats) for t in range(2))
            halves = PAIRED_COLUMNS[:LANES], PAIRED_COLUMNS[LANES:]
            orders = [[place for i in half for place in (i, i + TILE_COLUMNS)] for half in halves]
            return [writer.operand(writer.shuffle(first, second, order)) for order in orders]

        def place(s: int, c: int) -> Any:
            return builder.gep(result, [writer.add(builder.mul(stride, _INDEX(s)), c * LANES)])

        left = writer.address(weights_type, weights, weights_start)
        _tiles(
            writer, num_sums, left, weights_stride, num_steps, columns,
            lambda s, c: writer.load(place(s, c), _FLOATS), lambda s, c, total: writer.store(total, place(s, c)),
        )  # fmt: skip
        return context.get_dummy_value()

    index = types.int64
    return types.void(index, weights, index, index, kv, rows, index, index, sums, index, index), generate


def _score_rows_code(
    typing_context: Any, q: Any, q_start: Any, kv: Any, rows: Any, offset: Any, num_steps: Any, out: Any, out_start: Any
) -> Any:
    """out[t] = Σ q[d] · kv[rows[t] + offset + d], for LANES rows.

    Args:
        q: kv's type; a query from `q_start` on.
        kv: flat; float32, or bfloat16 as uint16.
        rows: [LANES] int64, where rows begin.
        num_steps: vectors that a row has.
        out: float32; LANES values from `out_start` on.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        q, q_start, kv, rows, offset, num_steps, out, out_start = args
        q_type, kv_type, rows_type, out_type = (signature.args[i] for i in (0, 2, 3, 6))
        writer = _Writer(context, builder, pairs=kv_type.dtype == types.uint16)
        words = _WORDS.as_pointer()
        query = builder.bitcast(writer.address(q_type, q, q_start), words)
        keys, starts = writer.address(kv_type, kv, offset), writer.address(rows_type, rows, _INDEX(0))
        lines = []
        for t in range(LANES):
            start = builder.load(builder.gep(starts, [_INDEX(t)]))
            lines.append(builder.bitcast(builder.gep(keys, [start]), words))
        sums = [_code.alloca_once_value(builder, ir.Constant(_FLOATS, None)) for _ in lines]
        with _code.for_range(builder, num_steps, intp=_INDEX) as loop:
            part = writer.operand(writer.load(builder.gep(query, [loop.index]), _WORDS))
            for line, place in zip(lines, sums, strict=True):
                key = writer.operand(writer.load(builder.gep(line, [loop.index]), _WORDS))
                builder.store(writer.multiply_add(part, key, builder.load(place)), place)
        total = _sum_each(writer, [builder.load(place) for place in sums])
        writer.store(total, writer.address(out_type, out, out_start))
        return context.get_dummy_value()

    index = types.int64
    return types.void(q, index, kv, rows, index, index, out, index), generate


def _sum_each(writer: _Writer, vectors: list[Any]) -> Any:
    """LANES vectors -> one, whose lane t is the sum of the t-th; each is summed in the same order.

    Two vectors become one of half as many partial sums each: first by quarters, then within them.
    """
    quarters = [[0, 8, 16, 24], [4, 12, 20, 28]]  # of one and of the other vector
    by_quarters = [[start + i for start in starts for i in range(4)] for starts in quarters]
    within = [
        [[4 * lane + i for lane in range(4) for i in picked] for picked in halves]
        for halves in ([[0, 1, 16, 17], [2, 3, 18, 19]], [[0, 2, 16, 18], [1, 3, 17, 19]])
    ]
    held: list[list[int]] = [[t] * LANES for t in range(LANES)]  # whose sum each lane is a part of
    for orders in (by_quarters, by_quarters, *within):
        merged, merged_held = [], []
        for i in range(0, len(vectors), 2):
            halves = [writer.shuffle(vectors[i], vectors[i + 1], order) for order in orders]
            merged.append(writer.builder.fadd(*halves))
            both = held[i] + held[i + 1]
            merged_held.append([both[place] for place in orders[0]])
        vectors, held = merged, merged_held
    [total], [owners] = vectors, held
    return writer.shuffle(total, total, [owners.index(t) for t in range(LANES)])


multiply_tile: Any = intrinsic(_multiply_tile_code)
add_weighted_rows: Any = intrinsic(_add_weighted_rows_code)
score_rows: Any = intrinsic(_score_rows_code)
