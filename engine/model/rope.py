"""Rotary position embedding, in float32, as transformers computes it."""

import math

import torch

from engine.cpu_code import as_numpy
from engine.model import cpu_layer
from engine.model.config import LinearScaling, Llama3Scaling, RopeConfig, YarnScaling


class RotaryEmbedding:
    """Turns pairs of dimensions (i, i + head_dim / 2) of a head by position · frequency i.

    Args:
        factors: [head_dim / 2] float32, what the frequencies are divided by, if the weights bring such a table.
    """

    def __init__(
        self,
        config: RopeConfig,
        head_dim: int,
        factors: torch.Tensor | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self._inv_freq = _frequencies(config, head_dim)
        if factors is not None:
            self._inv_freq /= factors
        self._inv_freq = self._inv_freq.to(device)
        self._magnitude = config.scaling.attention_factor if isinstance(config.scaling, YarnScaling) else 1.0

    def cos_sin(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of a step, for all its layers: [num_tokens] int64 -> twice [num_tokens, 1, head_dim / 2] float32.

        A few hundred angles: computed anew they cost less than a table of the whole context holds.
        """
        angles = (positions[:, None].to(torch.float32) * self._inv_freq)[:, None, :]
        cos, sin = angles.cos(), angles.sin()
        if self._magnitude != 1.0:
            cos, sin = cos * self._magnitude, sin * self._magnitude
        return cos, sin


def rotate(heads: torch.Tensor, num_rotated: int, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """The first `num_rotated` heads, turned; the dtype stays. On a CPU in place.

    Args:
        heads: [num_tokens, num_heads, head_dim], contiguous.
        cos, sin: as `RotaryEmbedding.cos_sin` returns them.
    """
    if heads.is_cpu:
        cpu_layer.rotate(as_numpy(heads), num_rotated, cos[:, 0].numpy(), sin[:, 0].numpy())
        return heads[:, :num_rotated]
    heads = heads[:, :num_rotated]
    first, second = heads.to(torch.float32).chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(heads.dtype)


def _frequencies(config: RopeConfig, head_dim: int) -> torch.Tensor:
    """[head_dim / 2] float32."""
    periods = config.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    plain = 1.0 / periods
    match config.scaling:
        case None:
            return plain
        case LinearScaling(factor):
            return plain / factor
        case Llama3Scaling():
            return _llama3(plain, config.scaling)
        case YarnScaling():
            return _yarn(periods, config.theta, head_dim, config.scaling)


def _llama3(plain: torch.Tensor, scaling: Llama3Scaling) -> torch.Tensor:
    turns = scaling.original_max_position_embeddings / (2 * math.pi / plain)  # in the original context
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = kept.clamp(0.0, 1.0)  # 0: slow, stretched whole; 1: fast, left alone
    return (1 - kept) * plain / scaling.factor + kept * plain


def _yarn(periods: torch.Tensor, theta: float, head_dim: int, scaling: YarnScaling) -> torch.Tensor:
    def dimension_turning(turns: float) -> float:
        """Which dimension turns so often in the original context."""
        wavelength = scaling.original_max_position_embeddings / (turns * 2 * math.pi)
        return head_dim * math.log(wavelength) / (2 * math.log(theta))

    low, high = dimension_turning(scaling.beta_fast), dimension_turning(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # a step instead of a ramp
    stretched = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0.0, 1.0)
    return stretched / (scaling.factor * periods) + (1 - stretched) / periods
