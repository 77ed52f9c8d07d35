"""`distribution.py` for all rows of a step that are not greedy, on their device.

Rows are dealt by what their parameters leave of the vocabulary, since only some need it in order:

- *open*: top-k and top-p leave all of it. Everybody races; min-p is a bound on weights.
- *short*: top-k leaves few. These alone are taken out, in line, and the rest is never looked at again.
- *long*: top-p, or a large top-k. The row is sorted.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.cuda.device_copy import DeviceCopy, Place
from engine.executor import SamplingInput
from engine.sampling.device_line import Tournament, line
from engine.sampling.device_race import first_to_arrive, signed
from engine.sampling.device_slabs import slabs
from engine.sampling.distribution import LOWEST
from engine.sampling.uniform import position_key
from engine.sampling_params import SamplingParams

# Longer ones are sorted faster than picked out.
_LONGEST_SHORT = 1024


@dataclass(frozen=True, slots=True)
class _Group:
    """Rows that are drawn from alike."""

    length: int  # tokens in line; 0: all, in no order
    num_rows: int
    rows: Place
    keys: Place
    temperature: Place
    min_p: Place
    lowest: Place
    top_k: Place
    top_p: Place


class DeviceDraw:
    """Draws for the rows of a step that are not greedy; made on the host, done on the device."""

    def __init__(self, inputs: Sequence[SamplingInput], vocab_size: int, copy: DeviceCopy) -> None:
        self._copy = copy
        groups: dict[str, list[int]] = {"open": [], "short": [], "long": []}
        for row, sampling in enumerate(inputs):
            if not sampling.params.is_greedy:
                groups[_kind(sampling, vocab_size)].append(row)
        self._groups = [
            self._group(rows, inputs, vocab_size, is_open=kind == "open") for kind, rows in groups.items() if rows
        ]

    def __bool__(self) -> bool:
        return bool(self._groups)

    def apply(self, rows: torch.Tensor, best: torch.Tensor, peaks: torch.Tensor) -> torch.Tensor:
        """[num_rows, 1] int64: the token of each row; of greedy ones, and where every token is masked, the best.

        Args:
            rows: [num_rows, vocab_size] float32, bent by penalties.
            best: [num_rows, 1] int64, the best tokens.
            peaks: [num_rows, 1] float32, their logits.
        """
        tokens = best.clone()
        for group in self._groups:
            for at in slabs(group.num_rows, rows.shape[1]):
                numbers = self._copy[group.rows][at]
                drawn = self._drawn(group, at, rows.index_select(0, numbers), peaks.index_select(0, numbers))
                # With every token masked no distribution is left.
                is_left = peaks.index_select(0, numbers) > -torch.inf
                tokens.index_copy_(0, numbers, torch.where(is_left, drawn, best.index_select(0, numbers)))
        return tokens

    def _drawn(self, group: _Group, at: slice, rows: torch.Tensor, peaks: torch.Tensor) -> torch.Tensor:
        keys, temperature, min_p, lowest = (
            self._copy[place][at, None] for place in (group.keys, group.temperature, group.min_p, group.lowest)
        )
        bound = _bound(peaks, temperature, lowest)
        if group.length == 0:
            weights = _weights(rows, peaks, temperature)
            weights.masked_fill_((weights < min_p) | (rows < bound), 0.0)
            everybody = torch.arange(rows.shape[1], device=rows.device)[None]
            return first_to_arrive(everybody, weights, keys)
        top_k, top_p = (self._copy[place][at, None] for place in (group.top_k, group.top_p))
        token_ids = line(rows, group.length)
        logits = rows.gather(1, token_ids)
        weights = _weights(logits, peaks, temperature)
        places = torch.arange(group.length, device=rows.device)[None]
        weights.masked_fill_((weights < min_p) | (logits < bound) | (places >= top_k), 0.0)
        tournament = Tournament(weights)
        last = tournament.first_reaching(top_p * tournament.total)
        weights.masked_fill_((places > last) & (top_p < 1.0), 0.0)
        return token_ids.gather(1, first_to_arrive(token_ids, weights, keys))

    def _group(self, rows: list[int], inputs: Sequence[SamplingInput], vocab_size: int, *, is_open: bool) -> _Group:
        params = [inputs[row].params for row in rows]
        top_k = [_top_k(inputs[row], vocab_size) for row in rows]
        longest = max(top_k)
        add_floats, add_ints = self._copy.add_floats, self._copy.add_ints
        return _Group(
            length=0 if is_open else longest if longest <= _LONGEST_SHORT else vocab_size,
            num_rows=len(rows),
            rows=add_ints(rows),
            keys=add_ints([signed(position_key(inputs[row].params.seed, inputs[row].position)) for row in rows]),
            temperature=add_floats([p.temperature for p in params]),
            min_p=add_floats([p.min_p for p in params]),
            lowest=add_floats([_lowest(p) for p in params]),
            top_k=add_ints(top_k),
            top_p=add_floats([p.top_p for p in params]),
        )


def _kind(sampling: SamplingInput, vocab_size: int) -> str:
    top_k = _top_k(sampling, vocab_size)
    if top_k == vocab_size and sampling.params.top_p >= 1.0:
        return "open"
    return "short" if top_k <= _LONGEST_SHORT else "long"


def _top_k(sampling: SamplingInput, vocab_size: int) -> int:
    top_k = sampling.params.top_k
    return min(top_k, vocab_size) if top_k > 0 else vocab_size


def _lowest(params: SamplingParams) -> float:
    """Log of what a weight must be for its logit to be looked at: as `distribution.py` picks candidates."""
    return math.log(params.min_p) if params.min_p > 0.0 and params.top_k <= 0 else -math.inf


def _bound(peaks: torch.Tensor, temperature: torch.Tensor, lowest: torch.Tensor) -> torch.Tensor:
    """[num_rows, 1] float32: what a logit must be, a little less than the weight that it stands for.

    It decides only where weights are rounded to the best token's own, at temperatures beyond all use.
    """
    bound = peaks + temperature * lowest
    bound = bound - 1e-6 * (peaks.abs() + bound.abs())
    return bound.clamp(min=LOWEST).to(torch.float32)


def _weights(logits: torch.Tensor, peaks: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """e^((logit - peak) / temperature), float64"""
    return logits.to(torch.float64).sub_(peaks).div_(temperature).exp_()
