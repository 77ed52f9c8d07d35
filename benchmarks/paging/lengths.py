"""How long requests are: drawn like ShareGPT's conversations, or read from a public trace."""

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benchmarks.paging.allocators import next_power_of_two
from benchmarks.traces import read_trace

# ShareGPT as Kwon et al. tokenized it for OPT, their figure 11: means of prompts and outputs, contexts up to 2,048.
SHAREGPT_MEANS = (161.31, 337.99)  # tokens
SHAREGPT_MAX_LEN = 2048  # tokens

# How wide: standard deviations of the logarithms. The paper shows the distributions but does not say their
# parameters; these give prompts a long tail and outputs a broad hump, as its figure has them.
_SPREADS = (1.2, 0.9)


@dataclass(frozen=True, slots=True)
class Lengths:
    """One request's, in tokens, each at least 1."""

    prompt: int
    output: int

    @property
    def total(self) -> int:
        return self.prompt + self.output


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in the order of their arrival."""

    name: str
    max_len: int  # tokens of one sequence, prompt and output: what a system must be ready for
    requests: tuple[Lengths, ...]
    is_as_published: bool = False  # as the paper's figures are of: they may stand beside what is found


def sharegpt_like(num_requests: int, seed: int) -> Workload:
    """Log-normal lengths, cut at half of the longest context each and scaled to the paper's means."""
    generator = np.random.default_rng(seed)
    prompts, outputs = (
        _with_mean(np.exp(spread * generator.standard_normal(num_requests)), mean, SHAREGPT_MAX_LEN // 2)
        for mean, spread in zip(SHAREGPT_MEANS, _SPREADS, strict=True)
    )
    requests = tuple(Lengths(p, o) for p, o in zip(prompts.tolist(), outputs.tolist(), strict=True))
    return Workload("ShareGPT-like", SHAREGPT_MAX_LEN, requests, is_as_published=True)


def from_traces(folder: Path, num_requests: int) -> list[Workload]:
    """The leading `num_requests` requests of every trace in the folder.

    Raises:
        OSError: the folder or a file cannot be read.
        ValueError: there is no trace in it, or one is wrong.
    """
    paths = sorted(path for path in folder.iterdir() if path.name.removesuffix(".gz").endswith((".csv", ".jsonl")))
    if not paths:
        raise ValueError(f"no trace (.csv, .jsonl, perhaps .gz) in {folder}")
    workloads = []
    for path in paths:
        trace = read_trace(path)
        # Of the whole trace, as a system would be set up for it: the longest may not be among the first.
        max_len = next_power_of_two(max(request.input_len + request.output_len for request in trace))
        name = path.name.removesuffix(".gz").rpartition(".")[0]
        requests = tuple(Lengths(request.input_len, request.output_len) for request in trace[:num_requests])
        workloads.append(Workload(name, max_len, requests))
    return workloads


def _with_mean(shape: npt.NDArray[np.float64], mean: float, longest: int) -> npt.NDArray[np.int64]:
    """`shape` times the factor that gives it this mean, after it is rounded and cut to 1 … `longest`."""
    low, high = 0.0, 1.0
    while math.isfinite(high) and _cut(shape * high, longest).mean() < mean:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _cut(shape * middle, longest).mean() < mean else (low, middle)
    return _cut(shape * high, longest)


def _cut(lengths: npt.NDArray[np.float64], longest: int) -> npt.NDArray[np.int64]:
    return np.clip(np.rint(lengths), 1, longest).astype(np.int64)
