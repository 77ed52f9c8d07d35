"""Sums in one order: against the same order written in numpy, and in whatever they are compiled into."""

from collections.abc import Callable

import numba
import numpy as np
import numpy.typing as npt
import pytest
import torch

from engine.cpu_code import Array, as_numpy, kernel, parallel_kernel
from engine.cpu_sums import row_sum, sum_of_squares
from engine.model.cpu_layer import rms_norm

Floats = npt.NDArray[np.float32]

LENGTHS = [0, 1, 15, 16, 63, 64, 65, 127, 128, 576, 1000]


@kernel
def _row_sum(x: Array, start: int, count: int) -> float:
    return row_sum(x, start, count)  # type: ignore[no-any-return]


@kernel
def _sum_of_squares(x: Array, start: int, count: int) -> float:
    return sum_of_squares(x, start, count)  # type: ignore[no-any-return]


def expected(x: Floats, add: Callable[[Floats, Floats], Floats]) -> np.float32:
    whole = len(x) // 64 * 64
    lanes = np.zeros(64, np.float32)
    for row in x[:whole].reshape(-1, 64):
        lanes = add(lanes, row)
    while len(lanes) > 1:
        half = len(lanes) // 2
        lanes = lanes[:half] + lanes[half:]
    for i in range(whole, len(x)):
        lanes = add(lanes, x[i : i + 1])
    return np.float32(lanes[0])


def fused_square(sums: Floats, x: Floats) -> Floats:
    # The square of a float32 is exact in float64, and so is the sum, nearly always: rounded once.
    return (sums.astype(np.float64) + x.astype(np.float64) ** 2).astype(np.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("length", LENGTHS)
def test_sums_have_the_order_that_is_written(length: int, dtype: torch.dtype) -> None:
    numbers = torch.randn(3 + length, generator=torch.Generator().manual_seed(length)).to(dtype)
    x, array = numbers[3:].float().numpy(), as_numpy(numbers)
    assert np.float32(_row_sum(array, 3, length)) == expected(x, np.add)
    assert np.float32(_sum_of_squares(array, 3, length)) == expected(x, fused_square)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_kernel_gives_the_same_bits_within_another_and_in_threads(dtype: torch.dtype) -> None:
    """What it is compiled into is the compiler's occasion to reorder, if it may."""

    @numba.njit(error_model="numpy")
    def within(x: Array, weight: Array, out: Array) -> None:
        for i in range(len(x)):
            rms_norm(x[i : i + 1], weight, np.float32(1e-5), out[i : i + 1])

    @parallel_kernel
    def in_threads(x: Array, weight: Array, out: Array) -> None:
        for i in numba.prange(len(x)):
            rms_norm(x[i : i + 1], weight, np.float32(1e-5), out[i : i + 1])

    generator = torch.Generator().manual_seed(1)
    x, weight = (torch.randn(shape, generator=generator).to(dtype) for shape in ((7, 576), (576,)))
    alone, *others = (torch.empty_like(x) for _ in range(3))
    rms_norm(as_numpy(x), as_numpy(weight), np.float32(1e-5), as_numpy(alone))
    for compiled, out in zip((within, in_threads), others, strict=True):
        compiled(as_numpy(x), as_numpy(weight), as_numpy(out))
        assert torch.equal(out, alone)
