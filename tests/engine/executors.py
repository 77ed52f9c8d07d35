"""Executors under test, by name: the scheduler's tests run over all of them.

Each comes with an oracle: the whole output of a request, computed without a block pool, a batch or a cache.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.executor import Executor
from engine.hash_executor import HashExecutor, expected_tokens
from engine.sampling_params import SamplingParams

VOCAB_SIZE = 97  # of every executor here


@dataclass(frozen=True)
class ExecutorCase:
    make: Callable[[int], Executor]  # block size -> a new, unbound executor; all of a case share their weights
    expected: Callable[[Sequence[int], SamplingParams, int], list[int]]  # prompt, params, max_model_len -> output
    max_examples: int  # that a hypothesis test can afford


EXECUTORS = {
    "hash": ExecutorCase(
        make=lambda block_size: HashExecutor(vocab_size=VOCAB_SIZE, block_size=block_size),
        expected=lambda prompt, params, max_model_len: expected_tokens(
            prompt, params, VOCAB_SIZE, max_model_len=max_model_len
        ),
        max_examples=100,
    ),
}
