"""Keys and values as a pool holds them: written once, for the backends that go through torch. See `KVScales`."""

import torch


def stored(computed: torch.Tensor, dtype: torch.dtype, scale: float) -> torch.Tensor:
    """`computed` in the pool's `dtype`; an 8-bit one holds the quotient by `scale`, at most its largest."""
    if dtype.itemsize > 1:
        return computed.to(dtype)
    # Divided by a tensor: given a number, CUDA multiplies by its reciprocal, which rounds twice. And older torch makes
    # NaN of what is too large.
    quotient = computed.to(torch.float32) / torch.full((), scale, device=computed.device)
    largest = torch.finfo(dtype).max
    return quotient.clamp(-largest, largest).to(dtype)


def computed(stored: torch.Tensor, dtype: torch.dtype, scale: float) -> torch.Tensor:
    """What was stored, as `dtype` again."""
    return stored.to(dtype) if scale == 1.0 else (stored.to(torch.float32) * scale).to(dtype)
