"""The linear layers with a packed weight against torch's own."""

import numba
import pytest
import torch
import torch.nn.functional as F
from numba.core import event

from engine.model import linear as linear_layers
from engine.model.linear import Linear, OneDnnLinear, PlainLinear, TiledLinear, make_linear

# The last panel of columns full, and filled by one and by 31 of 32; no panel that is full.
SHAPES = [(1, 2), (3, 14), (65, 48), (95, 6), (960, 576), (576, 1536)]
KINDS = pytest.mark.parametrize("kind", [TiledLinear, OneDnnLinear])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def linear_of(kind: type[TiledLinear | OneDnnLinear], weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
    if not kind.takes(weight):
        pytest.skip(f"no {kind.__name__} of {weight.dtype} on this CPU")
    return kind(weight.clone(), bias)


@KINDS
@DTYPES
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@torch.inference_mode()
def test_results_are_torchs_own(
    shape: tuple[int, int], bias: bool, dtype: torch.dtype, kind: type[TiledLinear | OneDnnLinear]
) -> None:
    torch.manual_seed(0)
    weight = (torch.randn(shape) / shape[1] ** 0.5).to(dtype)
    offsets = torch.randn(shape[0]).to(dtype) if bias else None
    linear = linear_of(kind, weight, offsets)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for num_tokens in (1, 2, 3, 4, 5, 6, 7, 8, 9, 17, 64):
        x = torch.randn(num_tokens, shape[1]).to(dtype)
        out = linear(x)
        assert out.is_contiguous()
        torch.testing.assert_close(out, F.linear(x, weight, offsets), atol=tolerance, rtol=tolerance)


@KINDS
@DTYPES
@pytest.mark.parametrize("shape", SHAPES[2:], ids=str)
@torch.inference_mode()
def test_a_row_is_the_same_to_the_bit_however_many_there_are(
    shape: tuple[int, int], dtype: torch.dtype, kind: type[TiledLinear | OneDnnLinear]
) -> None:
    torch.manual_seed(0)
    linear = linear_of(kind, torch.randn(shape).to(dtype))
    x = torch.randn(300, shape[1]).to(dtype)
    full = linear(x)
    for first, last in [(0, 1), (7, 8), (0, 2), (5, 8), (13, 30), (100, 164), (44, 300)]:
        assert torch.equal(linear(x[first:last]), full[first:last])


@pytest.mark.parametrize("rows", [1, 40])
@torch.inference_mode()
def test_sums_that_are_wanted_in_float32_are_not_rounded_before(rows: int) -> None:
    weight = torch.randn(40, 64).to(torch.bfloat16)
    linear_of(TiledLinear, weight)
    x = torch.randn(rows, 64).to(torch.bfloat16)
    expected = x.to(torch.float32) @ weight.to(torch.float32).T
    torch.testing.assert_close(make_linear(weight, to_float32=True)(x), expected, rtol=1e-5, atol=1e-5)


@torch.inference_mode()
def test_float32_is_had_of_any_linear_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TiledLinear, "takes", lambda weight: False)
    weight, x = torch.randn(40, 64).to(torch.bfloat16), torch.randn(3, 64).to(torch.bfloat16)
    logits = make_linear(weight, to_float32=True)(x)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, F.linear(x, weight).to(torch.float32), rtol=2e-2, atol=2e-2)


@DTYPES
@torch.inference_mode()
def test_threads_change_no_bit(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, bias, x = (torch.randn(shape).to(dtype) for shape in ((250, 64), (250,), (19, 64)))
    alone = linear_of(TiledLinear, weight, bias)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(linear_layers, "_LEAST_SHARED_BYTES", 0)
    assert torch.equal(TiledLinear(weight, bias)(x), alone(x))


@DTYPES
@torch.inference_mode()
def test_no_call_compiles_once_it_is_warm(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """With several threads small and large products are other code."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    linear = linear_of(TiledLinear, torch.randn(512, 512).to(dtype))
    assert isinstance(linear, TiledLinear)
    linear.warm_up(dtype)
    rows = 8 * linear_layers._LEAST_SHARED_BYTES // linear.packed[0].nbytes + 8
    with event.install_recorder("numba:compile") as compiled:
        for num_tokens in (1, rows):
            linear(torch.randn(num_tokens, 512).to(dtype))
    assert not compiled.buffer


@DTYPES
@torch.inference_mode()
def test_a_view_with_gaps_is_read_as_its_copy(dtype: torch.dtype) -> None:
    linear = linear_of(TiledLinear, torch.randn(40, 16).to(dtype))
    x = torch.randn(5, 32).to(dtype)
    assert torch.equal(linear(x[:, 8:24]), linear(x[:, 8:24].clone()))


@torch.inference_mode()
def test_a_row_that_is_no_number_spoils_no_other() -> None:
    linear = linear_of(TiledLinear, torch.randn(40, 16))
    x = torch.randn(5, 16)
    sound = linear(x)
    x[2, 3] = torch.nan
    spoiled = linear(x)
    assert spoiled[2].isnan().all()
    assert torch.equal(spoiled[[0, 1, 3, 4]], sound[[0, 1, 3, 4]])


def test_nothing_is_tiled_where_numba_compiles_for_another_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numba.config, "CPU_NAME", "generic")
    assert not isinstance(make_linear(torch.zeros(4, 4)), TiledLinear)


def test_what_cannot_be_packed_is_torchs() -> None:
    """Rows of bfloat16 that do not come in pairs; another device."""
    assert not TiledLinear.takes(torch.zeros(4, 3, dtype=torch.bfloat16))
    assert isinstance(make_linear(torch.zeros(4, 4, device="meta")), PlainLinear)
