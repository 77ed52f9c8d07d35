"""The sampler for logits on a GPU."""

from collections.abc import Sequence

import torch

from engine.executor import SampledToken, SamplingInput


class DeviceSampler:
    """Samples all rows of a step at once, where the logits are, with one copy to the host."""

    def sample(self, logits: torch.Tensor, inputs: Sequence[SamplingInput]) -> list[SampledToken]:
        """The next token of each row."""
        raise NotImplementedError
