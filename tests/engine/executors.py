"""Executors under test, by name: the scheduler's tests run over all of them.

Each comes with an oracle: the whole output of a request, computed without a block pool, a batch or a cache.
"""

import atexit
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from engine.executor import Executor, SampledToken, SamplingInput
from engine.hash_executor import HashExecutor, expected_prompt_logprobs, expected_tokens
from engine.sampling_params import SamplingParams, finish_reason_after

if TYPE_CHECKING:
    from transformers import PreTrainedModel

VOCAB_SIZE = 97  # of every executor here


@dataclass(frozen=True)
class ExecutorCase:
    make: Callable[[int], Executor]  # block size -> a new, unbound executor; all of a case share their weights
    expected: Callable[[Sequence[int], SamplingParams, int], list[int]]  # prompt, params, max_model_len -> output
    prompt_logprobs: Callable[[Sequence[int], SamplingParams], Sequence[SampledToken]]
    max_examples: int  # that a hypothesis test can afford


@cache
def _tiny_model() -> "tuple[Path, PreTrainedModel]":
    """A random Llama, in a folder and in transformers; made once, for all engines of the process."""
    from tests.tiny_models import save_model

    folder = Path(tempfile.mkdtemp(prefix="tandem-tiny-model-"))
    atexit.register(shutil.rmtree, folder)
    return folder, save_model(folder)


def _make_torch(block_size: int) -> Executor:
    from engine.torch_executor import TorchExecutor

    folder, _ = _tiny_model()
    return TorchExecutor(folder, dtype="float32", block_size=block_size, num_threads=1)


def _expected_torch(prompt: Sequence[int], params: SamplingParams, max_model_len: int) -> list[int]:
    """transformers' logits of the whole sequence, computed anew for every token, and our sampler."""
    from engine.sampling.sampler import Sampler
    from tests.tiny_models import logits_of

    _, model = _tiny_model()
    output: list[int] = []
    while True:
        logits = logits_of(model, [*prompt, *output])[-1:]
        (sampled,) = Sampler().sample(logits, [SamplingInput(params, prompt, output)])
        output.append(sampled.token_id)
        num_tokens = len(prompt) + len(output)
        if finish_reason_after(params, sampled.token_id, len(output), num_tokens, max_model_len) is not None:
            return output


def _prompt_logprobs_torch(prompt: Sequence[int], params: SamplingParams) -> list[SampledToken]:
    """transformers' logits, and torch's log_softmax."""
    from tests.tiny_models import logits_of

    _, model = _tiny_model()
    logprobs = logits_of(model, prompt)[:-1].double().log_softmax(dim=1)
    best = logprobs.topk(params.prompt_logprobs or 0, dim=1)
    return [
        SampledToken(target, float(row[target]), tuple(zip(ids.tolist(), values.tolist(), strict=True)))
        for target, row, ids, values in zip(prompt[1:], logprobs, best.indices, best.values, strict=True)
    ]


EXECUTORS = {
    "hash": ExecutorCase(
        make=lambda block_size: HashExecutor(vocab_size=VOCAB_SIZE, block_size=block_size),
        expected=lambda prompt, params, max_model_len: expected_tokens(
            prompt, params, VOCAB_SIZE, max_model_len=max_model_len
        ),
        prompt_logprobs=lambda prompt, params: expected_prompt_logprobs(prompt, params, VOCAB_SIZE) or (),
        max_examples=100,
    ),
    "torch": ExecutorCase(
        make=_make_torch, expected=_expected_torch, prompt_logprobs=_prompt_logprobs_torch, max_examples=25
    ),
}
