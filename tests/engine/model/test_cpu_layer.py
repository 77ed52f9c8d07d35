"""What runs between the matrix products on a CPU, against the same in torch, operation by operation."""

import pytest
import torch
import torch.nn.functional as F

from engine.cpu_code import as_numpy
from engine.model import cpu_layer
from engine.model.decoder_layer import silu_and_mul
from engine.model.norm import RMSNorm
from engine.model.rope import rotate

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def plain_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.to(torch.float32)
    scale = ((wide * wide).mean(-1, keepdim=True) + eps).rsqrt()
    return (wide * scale).to(x.dtype) * weight


def assert_rounds_alike(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """float32 within rounding; bfloat16 equal but where a last bit of a float32 sum decided a rounding."""
    if actual.dtype == torch.float32:
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
    else:
        torch.testing.assert_close(actual, expected, rtol=2**-7, atol=2**-7)
        assert (actual == expected).float().mean() > 0.99


@DTYPES
@pytest.mark.parametrize("size", [1, 10, 48, 576])
@pytest.mark.parametrize("num_rows", [1, 2, 37])
def test_norms_are_torchs_with_and_without_an_addition(num_rows: int, size: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(size)
    hidden, delta = (torch.randn(num_rows, size, generator=generator).to(dtype) for _ in range(2))
    weight = (1 + torch.randn(size, generator=generator)).to(dtype)
    norm = RMSNorm(weight, 1e-5)
    assert_rounds_alike(norm(hidden), plain_norm(hidden, weight, 1e-5))
    total = hidden + delta
    assert_rounds_alike(norm.after_adding(hidden, delta), plain_norm(total, weight, 1e-5))
    assert torch.equal(hidden, total), "in place, rounded as torch rounds"


@DTYPES
def test_a_row_is_normed_the_same_to_the_bit_whatever_stands_beside_it(dtype: torch.dtype) -> None:
    x = torch.randn(33, 576).to(dtype)
    norm = RMSNorm(torch.randn(576).to(dtype), 1e-5)
    together = norm(x)
    for row in range(33):
        assert torch.equal(norm(x[row : row + 1]), together[row : row + 1])


@DTYPES
def test_heads_of_a_strided_view_are_normed_as_their_copy(dtype: torch.dtype) -> None:
    fused = torch.randn(5, 7, 16).to(dtype)
    norm = RMSNorm(torch.randn(16).to(dtype), 1e-6)
    assert torch.equal(norm(fused[:, 2:5]), norm(fused[:, 2:5].clone()))


@DTYPES
def test_the_first_heads_are_turned_and_the_others_left(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    heads = torch.randn(11, 5, 12, generator=generator).to(dtype)
    angles = torch.randn(11, 1, 6, generator=generator)
    cos, sin = angles.cos(), angles.sin()
    first, second = heads[:, :3].to(torch.float32).chunk(2, dim=-1)
    expected = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(dtype)
    untouched = heads[:, 3:].clone()
    assert_rounds_alike(rotate(heads, 3, cos, sin), expected)
    assert torch.equal(heads[:, 3:], untouched)


@pytest.mark.parametrize(
    "value", [float("nan"), float("inf"), float("-inf"), 0.0, -0.0, 1.00390625, 1.01171875, 3.4e38, 1e-40, -2.5]
)
def test_a_sum_in_bfloat16_is_rounded_as_torch_rounds_it(value: float) -> None:
    """Ties to even, and what is no number stays none."""
    hidden = torch.full((1, 2), value, dtype=torch.float32).to(torch.bfloat16)
    delta = torch.tensor([[0.0, 0.00390625]], dtype=torch.float32).to(torch.bfloat16)
    expected, out = hidden + delta, torch.empty_like(hidden)
    ones = torch.ones(2, dtype=torch.bfloat16)
    cpu_layer.add_rms_norm(*(as_numpy(x) for x in (hidden, delta, ones)), torch.tensor(1e-5).numpy()[()], as_numpy(out))
    torch.testing.assert_close(hidden, expected, rtol=0, atol=0, equal_nan=True)


@DTYPES
@pytest.mark.parametrize("shape", [(1, 2), (3, 20), (33, 3072)], ids=str)
def test_the_gate_of_an_mlp_is_torchs(shape: tuple[int, int], dtype: torch.dtype) -> None:
    gate_up = 5 * torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    gate, up = gate_up.chunk(2, dim=-1)
    assert_rounds_alike(silu_and_mul(gate_up), F.silu(gate) * up)


def test_a_gate_far_out_is_zero_or_its_number_and_a_nan_stays_one() -> None:
    gate_up = torch.tensor([[-200.0, 200.0, 0.0, float("nan"), 3.0, 3.0, 3.0, 3.0]])
    product = silu_and_mul(gate_up)[0]
    torch.testing.assert_close(product[:3], torch.tensor([0.0, 600.0, 0.0]))
    assert product[3].isnan()
