"""The packed linear layer against torch's own."""

import pytest
import torch
import torch.nn.functional as F

from engine.model.linear import Linear, can_pack

SHAPES = [(1, 1), (3, 7), (131, 48), (960, 576), (576, 1536)]


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@torch.inference_mode()
def test_results_are_torchs_own(shape: tuple[int, int], dtype: torch.dtype, bias: bool, packed: bool) -> None:
    torch.manual_seed(0)
    weight = (torch.randn(shape) / shape[1] ** 0.5).to(dtype)
    if packed and not can_pack(weight):
        pytest.skip(f"no packing of {dtype} on this CPU")
    offsets = torch.randn(shape[0]).to(dtype) if bias else None
    linear = Linear(weight.clone(), offsets, packed=packed)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for num_tokens in (1, 2, 3, 17, 64):
        x = torch.randn(num_tokens, shape[1]).to(dtype)
        torch.testing.assert_close(linear(x), F.linear(x, weight, offsets), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES[2:], ids=str)
@torch.inference_mode()
def test_a_row_is_the_same_to_the_bit_however_many_there_are(shape: tuple[int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight = torch.randn(shape).to(dtype)
    if not can_pack(weight):
        pytest.skip(f"no packing of {dtype} on this CPU")
    linear = Linear(weight)
    x = torch.randn(300, shape[1]).to(dtype)
    full = linear(x)
    for first, last in [(0, 1), (7, 8), (0, 2), (5, 8), (13, 30), (100, 164), (44, 300)]:
        assert torch.equal(linear(x[first:last]), full[first:last])
