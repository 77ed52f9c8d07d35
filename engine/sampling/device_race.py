"""`race.py` in tensor operations: the same numbers (`uniform.py`), so the same winners, on any device."""

import torch

from engine.sampling.uniform import FIRST_FACTOR, INCREMENT, SECOND_FACTOR


def signed(word: int) -> int:
    """64 bits as torch holds them. Products and sums wrap around alike, signed or not."""
    return word - 2**64 if word >= 2**63 else word


_INCREMENT, _FIRST_FACTOR, _SECOND_FACTOR = signed(INCREMENT), signed(FIRST_FACTOR), signed(SECOND_FACTOR)


def uniforms(keys: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Each token's number in (0, 1) under its row's key.

    Args:
        keys: [num_rows, 1] int64, of `position_key`, signed.
        token_ids: [num_rows or 1, n] int64.

    Returns:
        [num_rows, n] float64.
    """
    x = keys + (token_ids + 1) * _INCREMENT
    x ^= _shifted(x, 30)
    x *= _FIRST_FACTOR
    x ^= _shifted(x, 27)
    x *= _SECOND_FACTOR
    x ^= _shifted(x, 31)
    return _shifted(x, 11).to(torch.float64).add_(0.5).mul_(2.0**-53)


def _shifted(x: torch.Tensor, bits: int) -> torch.Tensor:
    """To the right, zeros coming in: torch's shift of a signed number brings the sign in."""
    return (x >> bits).bitwise_and_(2 ** (64 - bits) - 1)


def first_to_arrive(token_ids: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """[num_rows, 1] int64: where in its row the token is that arrives first.

    Args:
        token_ids: [num_rows or 1, n] int64.
        weights: [num_rows, n] float64; a token of weight 0 never arrives. Overwritten.
        keys: [num_rows, 1] int64.
    """
    times = uniforms(keys, token_ids).neg_().log1p_().neg_()
    return torch.div(times, weights, out=times).argmin(dim=1, keepdim=True)
