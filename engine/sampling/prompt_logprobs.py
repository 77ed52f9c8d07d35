"""Log-probabilities of a prompt's own tokens: a row of logits for each, which are never all there at once.

A chunk of 2,048 tokens over a vocabulary of 128,256 would be a gigabyte of logits. So they are made of some rows at a
time, and reduced at once to what was asked for.
"""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from engine.executor import SampledToken
from engine.sampling.logprobs import with_logprobs

ROWS_AT_ONCE = 64


def prompt_logprobs(
    make_logits: Callable[[torch.Tensor], torch.Tensor],
    first_row: int,
    targets: Sequence[int],
    num_top: int,
    device: torch.device,
) -> list[SampledToken]:
    """What each of the rows from `first_row` on thinks of the token that comes after it.

    Args:
        make_logits: [num_rows] int64, rows of the step -> [num_rows, vocab_size] float32, raw.
        targets: those tokens, one a row.
        num_top: so many best tokens are told too.
        device: of the logits.
    """
    found: list[SampledToken] = []
    for start in range(0, len(targets), ROWS_AT_ONCE):
        some = targets[start : start + ROWS_AT_ONCE]
        rows = torch.arange(first_row + start, first_row + start + len(some), device=device)
        reduce = _on_host if device.type == "cpu" else _on_device
        found += reduce(make_logits(rows), some, num_top)
    return found


def _on_host(logits: torch.Tensor, targets: Sequence[int], num_top: int) -> list[SampledToken]:
    rows: npt.NDArray[np.float32] = logits.contiguous().numpy()
    scratch = np.empty(rows.shape[1], np.float64)
    return [with_logprobs(row, target, num_top, scratch) for row, target in zip(rows, targets, strict=True)]


def _on_device(logits: torch.Tensor, targets: Sequence[int], num_top: int) -> list[SampledToken]:
    # Not for a process without a GPU.
    from engine.sampling.device_logprobs import log_probabilities
    from engine.sampling.device_slabs import slabs

    num_top = min(num_top, logits.shape[1])
    tokens = torch.tensor(targets, device=logits.device)[:, None]
    parts = [log_probabilities(logits[at], tokens[at], num_top) for at in slabs(*logits.shape)]
    rows: npt.NDArray[np.float64] = torch.cat(parts).cpu().numpy()
    ids = rows[:, 1 : 1 + num_top].astype(np.int64)
    return [
        SampledToken(target, float(row[0]), tuple(zip(best.tolist(), row[1 + num_top :].tolist(), strict=True)))
        for target, row, best in zip(targets, rows, ids, strict=True)
    ]
